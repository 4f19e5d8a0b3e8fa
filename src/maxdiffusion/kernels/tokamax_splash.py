"""The tokamax package's splash kernel: attention, partials over some keys, and their gradients.

tokamax has no public name for it yet; everything that depends on its private modules is in this
file.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxdiffusion.kernels.reference import Partials
from maxdiffusion.kernels.splash import SplashBlocks, key_segments, pad_length, scaled

Tokens = Float[Array, "B S N H"]
Valid = Bool[Array, "B T"]


def tokamax_module() -> ModuleType:
    """tokamax's kernel module; importing it takes two seconds, so only plans that need it do."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel


@dataclass(frozen=True, kw_only=True)
class TokamaxOptions:
    """Everything about a call that is neither an array nor a size."""

    blocks: SplashBlocks
    scale: float
    use_base2_exp: bool = True
    use_experimental_scheduler: bool = False
    interpret: bool = False

    def config(self, *, use_base2_exp: bool) -> Any:
        """tokamax's own form of these options."""
        blocks = self.blocks
        return tokamax_module().SplashConfig(
            block_q=blocks.block_q,
            block_kv=blocks.block_kv,
            block_kv_compute=blocks.block_kv_compute,
            block_q_dkv=blocks.block_q_dkv,
            block_kv_dkv=blocks.block_kv_dkv,
            block_kv_dkv_compute=blocks.block_kv_dkv_compute,
            use_fused_bwd_kernel=True,
            use_base2_exp=use_base2_exp,
            use_experimental_scheduler=self.use_experimental_scheduler,
            interpret=self.interpret,
        )


def tokamax_attention(
    q: Tokens, k: Tokens, v: Tokens, valid: Valid | None, options: TokamaxOptions
) -> Tokens:
    """Attention over all keys, differentiable; a row without keys is unspecified."""
    config = options.config(use_base2_exp=options.use_base2_exp)
    out = _run(q, k, v, valid, options, _kernel(q, k, options, config, save_residuals=False))
    return _tokens(out, q.shape[1])


def tokamax_partials(
    q: Tokens, k: Tokens, v: Tokens, valid: Valid | None, options: TokamaxOptions
) -> Partials:
    """Attention over these keys, already divided: m is the natural log-sum and l is 1."""
    config = options.config(use_base2_exp=options.use_base2_exp)
    kernel = _kernel(q, k, options, config, save_residuals=True)
    out, saved = _run(q, k, v, valid, options, kernel)
    m = saved["logsumexp"][:, :, : q.shape[1]].transpose(0, 2, 1)
    out = _tokens(out, q.shape[1]).astype(jnp.float32)
    return Partials(o=out, m=m, l=jnp.ones_like(m))


def tokamax_gradients(
    qkv: tuple[Tokens, Tokens, Tokens],
    valid: Valid | None,
    outcome: tuple[Tokens, Float[Array, "B S N"], Tokens],
    options: TokamaxOptions,
) -> tuple[Tokens, Tokens, Tokens]:
    """What these keys contribute to the gradient of q, and the gradients of k and v.

    `outcome` is the output over *all* keys, its natural log-sum, and the gradient of the output.
    """
    q, k, v = qkv
    out, log_sum, d_out = outcome
    # The saved log-sum is natural, and only the natural exponent's backward pass reads it as such.
    config = options.config(use_base2_exp=False)
    kernel = _kernel(q, k, options, config, save_residuals=False)
    q_BNSH, k_BNTH, v_BNTH, ids = _inputs(q, k, v, valid, options)
    out_BNSH, d_out_BNSH = (
        pad_length(part.transpose(0, 2, 1, 3), 2, options.blocks.q_multiple)
        for part in (out, d_out)
    )
    log_sum_BNS = pad_length(log_sum.transpose(0, 2, 1), 2, options.blocks.q_multiple)

    def backward(q: Array, k: Array, v: Array, ids: Any, *rest: Array) -> tuple[Array, ...]:
        out, log_sum, d_out = rest
        saved = (q, k, v, ids, None, out, log_sum, kernel.dkv_mask_info)
        grads = tokamax_module()._splash_attention_bwd(
            False,
            kernel.kwargs["mask_value"],
            False,
            config,
            kernel.kwargs["mask_function"],
            kernel.kwargs["fwd_mask_sparsity"],
            kernel.kwargs["dkv_mask_sparsity"],
            saved,
            d_out,
        )
        return grads[2:5]

    d_q, d_k, d_v = jax.vmap(backward)(
        q_BNSH, k_BNTH, v_BNTH, ids, out_BNSH, log_sum_BNS, d_out_BNSH
    )
    d_q = _tokens(d_q, q.shape[1]).astype(jnp.float32) * options.scale
    return d_q, _tokens(d_k, k.shape[1]), _tokens(d_v, k.shape[1])


def _kernel(
    q: Tokens, k: Tokens, options: TokamaxOptions, config: Any, *, save_residuals: bool
) -> Any:
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask

    q_len = -(-q.shape[1] // options.blocks.q_multiple) * options.blocks.q_multiple
    kv_len = -(-k.shape[1] // options.blocks.kv_multiple) * options.blocks.kv_multiple
    return tokamax_module().make_splash_mha(
        splash_attention_mask.FullMask((q_len, kv_len)),
        config=config,
        save_residuals=save_residuals,
        q_seq_shards=1,
    )


def _inputs(
    q: Tokens, k: Tokens, v: Tokens, valid: Valid | None, options: TokamaxOptions
) -> tuple[Array, Array, Array, Any]:
    """q, k, v as [B, N, S, H] in whole tiles, and the segment ids that hide what does not count."""
    blocks = options.blocks
    q_BNSH = pad_length(scaled(q, options.scale).transpose(0, 2, 1, 3), 2, blocks.q_multiple)
    k_BNTH, v_BNTH = (
        pad_length(part.transpose(0, 2, 1, 3), 2, blocks.kv_multiple) for part in (k, v)
    )
    kv_ids = key_segments(valid, q.shape[0], k.shape[1], k_BNTH.shape[2])
    if kv_ids is None:
        return q_BNSH, k_BNTH, v_BNTH, None
    q_ids = jnp.ones((q.shape[0], q_BNSH.shape[2]), jnp.int32)
    return q_BNSH, k_BNTH, v_BNTH, tokamax_module().SegmentIds(q=q_ids, kv=kv_ids)


def _run(
    q: Tokens, k: Tokens, v: Tokens, valid: Valid | None, options: TokamaxOptions, kernel: Any
) -> Any:
    return jax.vmap(lambda q, k, v, ids: kernel(q, k, v, ids))(*_inputs(q, k, v, valid, options))


def _tokens(x: Float[Array, "B N S H"], length: int) -> Tokens:
    return x[:, :, :length].transpose(0, 2, 1, 3)

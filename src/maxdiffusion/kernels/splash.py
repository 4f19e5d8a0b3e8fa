"""jax's own splash attention kernel on [B, S, N, H] arrays of any length.

The tokamax package's splash kernel: attention, partials over some keys, and their gradients.

tokamax has no public name for it yet; everything that depends on its private modules is in this
file.
"""

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxdiffusion.kernels.reference import Partials, pad_length
from maxdiffusion.kernels.tpu import LANES, BlockSizes, round_up


def splash_module() -> ModuleType:
    """Returns jax's kernel module; importing Pallas is slow, so only plans that need it do."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel


def q_multiple(blocks: BlockSizes) -> int:
    """Returns the number that the padded query length is a multiple of."""
    return math.lcm(*filter(None, (blocks.block_q, blocks.block_q_dkv, blocks.block_q_dq)))


def kv_multiple(blocks: BlockSizes) -> int:
    """Returns the number that the padded key length is a multiple of."""
    return math.lcm(*filter(None, (blocks.block_kv, blocks.block_kv_dkv, blocks.block_kv_dq)))


def splash_vmem_bytes(blocks: BlockSizes, *, head_dim: int, itemsize: int) -> int:
    """Returns the VMEM of a forward call: blocks, held twice, float32 state, a tile of scores."""
    lanes = round_up(head_dim, LANES)
    buffers = 2 * (2 * blocks.block_q + 2 * blocks.block_kv) * lanes * itemsize
    state = blocks.block_q * (lanes + 2 * LANES) * 4
    return buffers + state + blocks.block_q * blocks.block_kv_compute * 4


def key_segments(
    valid: Bool[Array, "B T"] | None, batch: int, keys: int, padded: int
) -> Int[Array, "B _T"] | None:
    """Returns segment ids: 1 for keys that count, 0 for others; None if all count."""
    if valid is None and padded == keys:
        return None
    if valid is None:
        valid = jnp.ones((batch, keys), bool)
    return jnp.pad(valid.astype(jnp.int32), ((0, 0), (0, padded - keys)))


def scaled(q: Float[Array, "B S N H"], scale: float) -> Float[Array, "B S N H"]:
    """Returns q times `scale`, multiplied in float32 and rounded once."""
    return (q.astype(jnp.float32) * scale).astype(q.dtype)


def splash_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N H"],
    *,
    blocks: BlockSizes,
    scale: float,
    valid: Bool[Array, "B T"] | None = None,
    interpret: bool = False,
    saved_as: str | None = None,
) -> Float[Array, "B S N H"]:
    """Returns attention by jax's splash kernel; a row without keys is unspecified.

    A rematerialisation policy finds output and log-sums, as the kernel returns them, by `saved_as`.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

    splash = splash_module()
    batch, q_len, heads, _ = q.shape
    keys = k.shape[1]
    q_BNSH, k_BNTH, v_BNTH = (
        pad_length(array.transpose(0, 2, 1, 3), 2, multiple)
        for array, multiple in (
            (scaled(q, scale), q_multiple(blocks)),
            (k, kv_multiple(blocks)),
            (v, kv_multiple(blocks)),
        )
    )
    shape = (q_BNSH.shape[2], k_BNTH.shape[2])
    kernel = splash.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask([splash_attention_mask.FullMask(shape)] * heads),
        block_sizes=_jax_block_sizes(splash, blocks),
        interpret=interpret,
        residual_checkpoint_name=saved_as,
    )
    kv_ids = key_segments(valid, batch, keys, shape[1])
    if kv_ids is None:
        out = jax.vmap(kernel)(q_BNSH, k_BNTH, v_BNTH)
    else:
        ids = splash.SegmentIds(q=jnp.ones((batch, shape[0]), jnp.int32), kv=kv_ids)
        out = jax.vmap(kernel)(q_BNSH, k_BNTH, v_BNTH, ids)
    tokens: Array = out[:, :, :q_len].transpose(0, 2, 1, 3)
    return tokens


def _splash_sizes(blocks: BlockSizes) -> dict[str, Any]:
    """Returns the sizes that the kernels of jax and of tokamax both take."""
    return {
        "block_q": blocks.block_q,
        "block_kv": blocks.block_kv,
        "block_kv_compute": blocks.block_kv_compute,
        "block_q_dkv": blocks.block_q_dkv,
        "block_kv_dkv": blocks.block_kv_dkv,
        "block_kv_dkv_compute": blocks.block_kv_dkv_compute,
    }


def _jax_block_sizes(splash: ModuleType, blocks: BlockSizes) -> Any:
    """Returns jax's own form of these sizes; a fused backward pass has no sizes for dq."""
    fused = bool(blocks.use_fused_bwd_kernel)
    return splash.BlockSizes(
        **_splash_sizes(blocks),
        block_q_dq=None if fused else blocks.block_q_dq,
        block_kv_dq=None if fused else blocks.block_kv_dq,
        use_fused_bwd_kernel=fused,
    )


Queries = Float[Array, "B S N H"]
Keys = Float[Array, "B T N H"]
Valid = Bool[Array, "B T"]


def tokamax_module() -> ModuleType:
    """Returns tokamax's kernel module; importing it takes 2 s, so only plans that need it do."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel

    module: ModuleType = splash_attention_kernel
    return module


@dataclass(frozen=True, kw_only=True)
class TokamaxOptions:
    """Everything about a call that is neither an array nor a size."""

    blocks: BlockSizes
    scale: float
    use_base2_exp: bool = True
    use_experimental_scheduler: bool = False
    interpret: bool = False

    def config(self, *, use_base2_exp: bool) -> Any:
        """Returns tokamax's own form of these options."""
        return tokamax_module().SplashConfig(
            **_splash_sizes(self.blocks),
            use_fused_bwd_kernel=True,  # tokamax has no other
            use_base2_exp=use_base2_exp,
            use_experimental_scheduler=self.use_experimental_scheduler,
            interpret=self.interpret,
        )


def tokamax_attention(
    q: Queries, k: Keys, v: Keys, valid: Valid | None, options: TokamaxOptions
) -> Queries:
    """Returns attention over all keys; a row without keys is unspecified."""
    config = options.config(use_base2_exp=options.use_base2_exp)
    out = _run(q, k, v, valid, options, _kernel(q, k, options, config, save_residuals=False))
    return _tokens(out, q.shape[1])


def tokamax_partials(
    q: Queries, k: Keys, v: Keys, valid: Valid | None, options: TokamaxOptions
) -> Partials:
    """Returns attention over these keys, already divided: m is the natural log-sum and l is 1."""
    config = options.config(use_base2_exp=options.use_base2_exp)
    kernel = _kernel(q, k, options, config, save_residuals=True)
    out, saved = _run(q, k, v, valid, options, kernel)
    m = saved["logsumexp"][:, :, : q.shape[1]].transpose(0, 2, 1)
    out = _tokens(out, q.shape[1]).astype(jnp.float32)
    return Partials(o=out, m=m, l=jnp.ones_like(m))


def tokamax_gradients(
    qkv: tuple[Queries, Keys, Keys],
    valid: Valid | None,
    outcome: tuple[Float[Array, "B S N"], Float[Array, "B S N"], Queries],
    options: TokamaxOptions,
) -> tuple[Queries, Keys, Keys]:
    """Returns the share of these keys in the gradient of q, and the gradients of k and v.

    `outcome` is the natural log-sum over *all* keys, sum(output * its gradient) over head features,
    and the gradient of the output.
    """
    q, k, v = qkv
    # The saved log-sum is natural, and only the natural exponent's backward pass reads it as such.
    config = options.config(use_base2_exp=False)
    kernel = _kernel(q, k, options, config, save_residuals=False)
    q_BNSH, k_BNTH, v_BNTH, ids = _inputs(q, k, v, valid, options)
    log_sum, delta, d_out = outcome
    # Without keys the log-sum is that of masked scores. Zero makes their probabilities zero.
    per_query = jnp.where(log_sum > NO_KEYS, log_sum, 0.0), delta
    rows = q_multiple(options.blocks)
    log_sum_BNS, delta_BNS = (pad_length(part.transpose(0, 2, 1), 2, rows) for part in per_query)
    d_out_BNSH = pad_length(d_out.transpose(0, 2, 1, 3), 2, rows)

    def backward(q: Array, k: Array, v: Array, ids: Any, *rest: Array) -> tuple[Array, ...]:
        log_sum, delta, d_out = rest
        d_qkv: tuple[Array, ...] = tokamax_module()._splash_attention_bwd_dkv(
            *(q, k, v, ids, log_sum, d_out, delta),
            bq=config.block_q_dkv,
            bkv=config.block_kv_dkv,
            bkv_compute=config.block_kv_dkv_compute,
            is_mqa=False,
            mask_info=kernel.dkv_mask_info,
            config=config,
            **{name: kernel.kwargs[name] for name in _BACKWARD_SETTINGS},
        )
        return d_qkv

    d_q, d_k, d_v = jax.vmap(backward)(
        q_BNSH, k_BNTH, v_BNTH, ids, log_sum_BNS, delta_BNS, d_out_BNSH
    )
    d_q = _tokens(d_q, q.shape[1]).astype(jnp.float32) * options.scale
    return d_q, _tokens(d_k, k.shape[1]), _tokens(d_v, k.shape[1])


NO_KEYS = -1e30
"""Log-sums below are those of queries without keys."""
_BACKWARD_SETTINGS = ("mask_value", "mask_function", "dkv_mask_sparsity")


def _kernel(
    q: Queries, k: Keys, options: TokamaxOptions, config: Any, *, save_residuals: bool
) -> Any:
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask

    q_len = -(-q.shape[1] // q_multiple(options.blocks)) * q_multiple(options.blocks)
    kv_len = -(-k.shape[1] // kv_multiple(options.blocks)) * kv_multiple(options.blocks)
    return tokamax_module().make_splash_mha(
        splash_attention_mask.FullMask((q_len, kv_len)),
        config=config,
        save_residuals=save_residuals,
        q_seq_shards=1,
    )


def _inputs(
    q: Queries, k: Keys, v: Keys, valid: Valid | None, options: TokamaxOptions
) -> tuple[Array, Array, Array, Any]:
    """Returns q, k, v as [B, N, S, H] in whole tiles, and the segment ids of keys that count."""
    blocks = options.blocks
    q_BNSH = pad_length(scaled(q, options.scale).transpose(0, 2, 1, 3), 2, q_multiple(blocks))
    k_BNTH, v_BNTH = (
        pad_length(part.transpose(0, 2, 1, 3), 2, kv_multiple(blocks)) for part in (k, v)
    )
    kv_ids = key_segments(valid, q.shape[0], k.shape[1], k_BNTH.shape[2])
    if kv_ids is None:
        return q_BNSH, k_BNTH, v_BNTH, None
    q_ids = jnp.ones((q.shape[0], q_BNSH.shape[2]), jnp.int32)
    return q_BNSH, k_BNTH, v_BNTH, tokamax_module().SegmentIds(q=q_ids, kv=kv_ids)


def _run(
    q: Queries, k: Keys, v: Keys, valid: Valid | None, options: TokamaxOptions, kernel: Any
) -> Any:
    return jax.vmap(lambda q, k, v, ids: kernel(q, k, v, ids))(*_inputs(q, k, v, valid, options))


def _tokens(x: Float[Array, "B N _S H"], length: int) -> Float[Array, "B _ N H"]:
    return x[:, :, :length].transpose(0, 2, 1, 3)

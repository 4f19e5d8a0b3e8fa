"""jax's own splash attention kernel on [B, S, N, H] arrays of any length."""

import math
from dataclasses import dataclass
from types import ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

LANES = 128


def splash_module() -> ModuleType:
    """jax's kernel module; importing Pallas takes a while, so only plans that need it do."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel


@dataclass(frozen=True, kw_only=True)
class SplashBlocks:
    """Tile sizes of the forward and backward splash kernels, all multiples of 128."""

    block_q: int
    block_kv: int
    block_kv_compute: int
    block_q_dkv: int
    block_kv_dkv: int
    block_kv_dkv_compute: int
    block_q_dq: int
    block_kv_dq: int

    @property
    def q_multiple(self) -> int:
        """What the padded query length is a multiple of."""
        return math.lcm(self.block_q, self.block_q_dkv, self.block_q_dq)

    @property
    def kv_multiple(self) -> int:
        """What the padded key length is a multiple of."""
        return math.lcm(self.block_kv, self.block_kv_dkv, self.block_kv_dq)

    def vmem_bytes(self, head_dim: int, itemsize: int) -> int:
        """VMEM of a forward call: blocks, held twice, its float32 state, and one tile of scores."""
        lanes = -(-head_dim // 128) * 128
        blocks = 2 * (2 * self.block_q + 2 * self.block_kv) * lanes * itemsize
        state = self.block_q * (lanes + 2 * 128) * 4
        return blocks + state + self.block_q * self.block_kv_compute * 4


def pad_length(array: Array, dim: int, multiple: int) -> Array:
    """`array` with zeros appended until its dimension `dim` is a multiple of `multiple`."""
    missing = -array.shape[dim] % multiple
    if missing == 0:
        return array
    widths = [(0, 0)] * array.ndim
    widths[dim] = (0, missing)
    return jnp.pad(array, widths)


def key_segments(
    valid: Bool[Array, "B T"] | None, batch: int, keys: int, padded: int
) -> Int[Array, "B T"] | None:
    """Segment ids that tell keys that count (1) from those that do not (0); None if all count."""
    if valid is None and padded == keys:
        return None
    if valid is None:
        valid = jnp.ones((batch, keys), bool)
    return jnp.pad(valid.astype(jnp.int32), ((0, 0), (0, padded - keys)))


def scaled(q: Float[Array, "B S N H"], scale: float) -> Float[Array, "B S N H"]:
    """q times `scale`, multiplied in float32 and rounded once."""
    return (q.astype(jnp.float32) * scale).astype(q.dtype)


def splash_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N H"],
    *,
    blocks: SplashBlocks,
    scale: float,
    valid: Bool[Array, "B T"] | None = None,
    interpret: bool = False,
) -> Float[Array, "B S N H"]:
    """Attention by jax's splash kernel, differentiable; a row without keys is unspecified."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

    splash = splash_module()
    batch, q_len, heads, _ = q.shape
    keys = k.shape[1]
    q_BNSH, k_BNTH, v_BNTH = (
        pad_length(array.transpose(0, 2, 1, 3), 2, multiple)
        for array, multiple in (
            (scaled(q, scale), blocks.q_multiple),
            (k, blocks.kv_multiple),
            (v, blocks.kv_multiple),
        )
    )
    shape = (q_BNSH.shape[2], k_BNTH.shape[2])
    kernel = splash.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask([splash_attention_mask.FullMask(shape)] * heads),
        block_sizes=splash.BlockSizes(**vars(blocks)),
        interpret=interpret,
    )
    kv_ids = key_segments(valid, batch, keys, shape[1])
    if kv_ids is None:
        out = jax.vmap(kernel)(q_BNSH, k_BNTH, v_BNTH)
    else:
        ids = splash.SegmentIds(q=jnp.ones((batch, shape[0]), jnp.int32), kv=kv_ids)
        out = jax.vmap(kernel)(q_BNSH, k_BNTH, v_BNTH, ids)
    return out[:, :, :q_len].transpose(0, 2, 1, 3)

"""Inputs of the flash kernel tests, and how far from the reference rounding may take it."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxdiffusion.kernels.flash import (
    Exponent,
    FixedM,
    FlashOptions,
    flash_attention,
    reference_attention,
    smooth_keys,
)
from maxdiffusion.kernels.flash.api import attended_keys
from maxdiffusion.kernels.tpu import BlockSizes

UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-9}
"""Half the spacing of numbers near one."""


def small_blocks(heads_per_tile: int = 1, block_q: int = 128) -> BlockSizes:
    """Returns the least tiles: several blocks of everything at two hundred tokens."""
    return BlockSizes(
        block_q=block_q,
        block_kv=128,
        block_kv_compute=128,
        block_kv_compute_in=128,
        heads_per_tile=heads_per_tile,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem with random q, k, v."""

    batch: int = 1
    q_len: int = 200
    kv_len: int = 300
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 128
    dtype: str = "float32"
    blocks: BlockSizes = field(default_factory=small_blocks)
    options: FlashOptions = field(default_factory=lambda: FlashOptions(interpret=True))
    lengths: tuple[int, ...] | None = None
    masked: bool = False

    def arrays(self) -> tuple[Array, Array, Array]:
        """Returns q, k, v."""
        keys = jax.random.split(jax.random.key(self.q_len + self.head_dim), 3)
        q_shape = (self.batch, self.q_len, self.heads, self.head_dim)
        kv_shape = (self.batch, self.kv_len, self.kv_heads, self.head_dim)
        shapes = (q_shape, kv_shape, kv_shape)
        q, k, v = (jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True))
        return tuple(x.astype(self.dtype) for x in (q, k + 0.5, v))

    def selection(self) -> dict[str, Array | None]:
        """Returns `kv_len` and `kv_mask` as the kernel takes them."""
        mask = None
        if self.masked:
            mask = jax.random.bernoulli(jax.random.key(3), 0.5, (self.batch, self.kv_len))
            # One row begins with a whole hidden block, one with a whole open one.
            mask = mask.at[0, :128].set(False).at[-1, :128].set(True)
        lengths = None if self.lengths is None else jnp.array(self.lengths, jnp.int32)
        return {"kv_len": lengths, "kv_mask": mask}


def run(case: Case, q: Array, k: Array, v: Array) -> Array:
    """Returns the kernel's output."""
    attend = jax.jit(flash_attention, static_argnames=("blocks", "options"))
    return attend(q, k, v, blocks=case.blocks, options=case.options, **case.selection())


def expected(case: Case, q: Array, k: Array, v: Array) -> Array:
    """Returns the float32 reference on q and k as the kernel multiplies them, once rounded."""
    selection = case.selection()
    if isinstance(case.options.softmax, FixedM):
        k = smooth_keys(k, attended_keys(**selection, keys=k.shape[1]))
    scale = case.options.exponent.per_nat * case.head_dim**-0.5
    rounded = (q.astype(jnp.float32) * scale).astype(case.dtype).astype(jnp.float32) / scale
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    return reference_attention(rounded, k, v, **selection)


def tolerance(case: Case, q: Array, k: Array, v: Array) -> float:
    """Returns what rounding can do to the output, in units of the largest |v|.

    A score is a sum of H products, an output one of T; their roundings add up like the root of
    their number, and four such deviations are allowed. Scores are rounded once more against a
    reference of up to the fixed-m bound. In bfloat16 p and the output are rounded too: two halves
    of a unit.
    """
    float_unit = UNIT["float32"]
    norms = [np.linalg.norm(np.asarray(x, np.float64), axis=-1).max() for x in (q, k)]
    score = norms[0] * norms[1] * case.head_dim**-0.5 * Exponent.BASE_2.per_nat
    sums = 4 * float_unit * (case.head_dim**0.5 * score + score + case.kv_len**0.5)
    rounding = 2 * UNIT["bfloat16"] if case.dtype == "bfloat16" else 2 * float_unit
    return float(jnp.max(jnp.abs(v.astype(jnp.float32)))) * (sums + rounding)


def error(actual: Array, wanted: Array) -> float:
    """Returns the largest difference, NaN if there is one."""
    return float(jnp.max(jnp.abs(actual.astype(jnp.float32) - wanted.astype(jnp.float32))))

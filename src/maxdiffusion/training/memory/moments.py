"""Formats of Adam's moments: float32, or fewer bits with stochastic rounding.

    float32    4 bytes, exact
    bfloat16   2 bytes, rounded up or down at random, so that the mean of many steps is exact
    int8       1 byte and a float32 scale for each block of 128; codes are denser near zero

Rounding to nearest would stop the second moment: with b2 = 0.999 a step changes it by a thousandth,
less than half a step of either format. The random bits follow from the PRNG key of the step, so a
continued run repeats them.

An 8-bit code c stands for `scale (c / levels)^power`: power 2 for the first moment (signed, 127
levels), power 4 for the second (255 levels), whose codes are at least 1. A second moment below
scale / 255^4 is thus kept at that value, which makes its update smaller, never larger.
"""

import zlib
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt

from maxdiffusion.models.abstract import register_tree

BLOCK = 128


class MomentsFormat(Enum):
    """Names the formats; all but float32 are lossy."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


@register_tree
@dataclass(frozen=True, kw_only=True)
class Packed:
    """An array in 8 bits: codes of its shape, and a scale for each block of its last dimension."""

    codes: Int[Array, "..."] | UInt[Array, "..."]
    scales: Float[Array, "..."]


@dataclass(frozen=True, kw_only=True)
class Coding:
    """Codes c of values `scale (c / levels)^power`, signed or from `least` up."""

    levels: int
    power: int
    signed: bool
    least: int = 0

    def pack(self, x: Float[Array, "..."], key: PRNGKeyArray) -> Packed:
        """Returns the codes, each rounded to one of its two neighbours; the mean is x."""
        blocks = _in_blocks(x)
        scales = jnp.max(jnp.abs(blocks), axis=-1)
        # A block of zeros has codes of zeros, and any scale.
        share = jnp.abs(blocks) / jnp.maximum(scales, jnp.finfo(jnp.float32).tiny)[..., None]
        low = jnp.clip(jnp.floor(self._codes(share)), self.least, self.levels - 1)
        below, above = self._shares(low), self._shares(low + 1)
        chance = (share - below) / (above - below)
        drawn = jax.random.uniform(key, blocks.shape)
        codes = low + (drawn < chance).astype(jnp.float32)
        if self.signed:
            codes = codes * jnp.sign(blocks)
        dtype = jnp.int8 if self.signed else jnp.uint8
        return Packed(codes=codes.astype(dtype).reshape(x.shape), scales=scales)

    def unpack(self, packed: Packed) -> Float[Array, "..."]:
        """Returns the values of the codes."""
        codes = _in_blocks(packed.codes.astype(jnp.float32))
        values = self._shares(jnp.abs(codes)) * packed.scales[..., None]
        if self.signed:
            values = values * jnp.sign(codes)
        return values.reshape(packed.codes.shape)

    def _codes(self, share: Float[Array, "..."]) -> Float[Array, "..."]:
        for _ in range(self.power.bit_length() - 1):  # a power of 2, so that roots are exact
            share = jnp.sqrt(share)
        return share * self.levels

    def _shares(self, codes: Float[Array, "..."]) -> Float[Array, "..."]:
        return (codes / self.levels) ** self.power


FIRST = Coding(levels=127, power=2, signed=True)
SECOND = Coding(levels=255, power=4, signed=False, least=1)


def _in_blocks(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the array with its last dimension in blocks; one block where 128 does not divide."""
    if x.ndim == 0:
        return x.reshape(1, 1)
    last = x.shape[-1]
    size = BLOCK if last % BLOCK == 0 else last
    return x.reshape(*x.shape[:-1], last // size, size)


def pack_moments(state: Any, kept: MomentsFormat, key: PRNGKeyArray) -> Any:
    """Returns the state of an optax chain with the moments of Adam in a format."""
    if kept is MomentsFormat.FLOAT32:
        return state

    def pack(adam: optax.ScaleByAdamState) -> optax.ScaleByAdamState:
        first, second = jax.random.split(key)
        return adam._replace(
            mu=_packed(adam.mu, kept, FIRST, first), nu=_packed(adam.nu, kept, SECOND, second)
        )

    return _on_adam(pack, state)


def unpack_moments(state: Any, kept: MomentsFormat) -> Any:
    """Returns the state with the moments in float32."""
    if kept is MomentsFormat.FLOAT32:
        return state

    def unpack(adam: optax.ScaleByAdamState) -> optax.ScaleByAdamState:
        return adam._replace(mu=_unpacked(adam.mu, FIRST), nu=_unpacked(adam.nu, SECOND))

    return _on_adam(unpack, state)


def _on_adam(change: Any, state: Any) -> Any:
    """Returns the tuple of a chain's states with that of Adam changed."""
    return tuple(
        change(part) if isinstance(part, optax.ScaleByAdamState) else part for part in state
    )


def _packed(values: Any, kept: MomentsFormat, coding: Coding, key: PRNGKeyArray) -> Any:
    def pack(path: str, x: Float[Array, "..."]) -> Any:
        own = jax.random.fold_in(key, zlib.crc32(path.encode()))
        if kept is MomentsFormat.BFLOAT16:
            return stochastic_bfloat16(x, own)
        return coding.pack(x, own)

    return {path: pack(path, x) for path, x in values.items()}


def _unpacked(values: Any, coding: Coding) -> Any:
    return {
        path: coding.unpack(x) if isinstance(x, Packed) else x.astype(jnp.float32)
        for path, x in values.items()
    }


def stochastic_bfloat16(x: Float[Array, "..."], key: PRNGKeyArray) -> Float[Array, "..."]:
    """Returns x rounded to a neighbour in bfloat16 at random; the mean is x."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    cut = (bits + noise) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(cut, jnp.float32).astype(jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))

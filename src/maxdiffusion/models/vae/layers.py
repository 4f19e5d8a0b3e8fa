"""The layers that encoder and decoder share: norm, residual block, attention within a frame."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from maxdiffusion.models.vae.convolution import CausalConv, Numerics, Pointwise
from maxdiffusion.models.vae.sharding import WHOLE, SpatialSharding

# Attention scores that one device holds at a time: 2^26 float32 are 256 MiB. A 720p frame has
# 14,400^2 = 3.1 * 2^26 of them.
MOST_SCORES = 2**26

# What a layer has seen: nested tuples of [B K Y X C] in the order of its own layers.
Past = Any


class RmsNorm(nnx.Module):
    """Scales the channels of every pixel to unit root mean square, in float32."""

    def __init__(self, dim: int, numerics: Numerics):
        self.gamma = nnx.Param(jnp.ones((dim,), numerics.param_dtype), dims=("channels",))

    def __call__(self, x: Float[Array, "*dims C"]) -> Float[Array, "*dims C"]:
        values = x.astype(jnp.float32)
        squares = jnp.sum(values * values, axis=-1, keepdims=True)
        # The norm is kept above 1e-12, so its square above 1e-24.
        scale = lax.rsqrt(jnp.maximum(squares, 1e-24)) * math.sqrt(x.shape[-1])
        return (values * scale * self.gamma[...].astype(jnp.float32)).astype(x.dtype)


class ResidualBlock(nnx.Module):
    """Two times norm, SiLU and causal convolution, added to the input."""

    def __init__(self, in_dim: int, out_dim: int, numerics: Numerics):
        self.norm1 = RmsNorm(in_dim, numerics)
        self.conv1 = CausalConv((3, 3, 3, in_dim, out_dim), numerics)
        self.norm2 = RmsNorm(out_dim, numerics)
        self.conv2 = CausalConv((3, 3, 3, out_dim, out_dim), numerics)
        self.shortcut = (
            None if in_dim == out_dim else Pointwise((1, 1, 1, in_dim, out_dim), numerics)
        )

    def __call__(
        self, x: Float[Array, "B F Y X C"], past: Past, sharding: SpatialSharding = WHOLE
    ) -> tuple[Float[Array, "B F Y X D"], Past]:
        past1, past2 = (None, None) if past is None else past
        y, past1 = self.conv1(jax.nn.silu(self.norm1(x)), past1, sharding)
        y, past2 = self.conv2(jax.nn.silu(self.norm2(y)), past2, sharding)
        return y + (x if self.shortcut is None else self.shortcut(x)), (past1, past2)


class FrameAttention(nnx.Module):
    """Attention of one head among the pixels of a frame, added to the input."""

    def __init__(self, dim: int, numerics: Numerics):
        self.norm = RmsNorm(dim, numerics)
        self.to_qkv = Pointwise((1, 1, dim, 3 * dim), numerics)
        self.proj = Pointwise((1, 1, dim, dim), numerics)

    def __call__(
        self, x: Float[Array, "B F Y X C"], sharding: SpatialSharding
    ) -> Float[Array, "B F Y X C"]:
        q, k, v = jnp.split(self.to_qkv(self.norm(x)), 3, axis=-1)
        # Every device keeps its own queries and sees all keys of the frame.
        k, v = sharding.gather(k), sharding.gather(v)
        attended = attend_frame_by_frame(sharding.constrain(q), k, v, sharding)
        return x + self.proj(sharding.constrain(attended))


class MidBlock(nnx.Module):
    """Residual block, attention, residual block, at the lowest resolution."""

    def __init__(self, dim: int, numerics: Numerics):
        self.before = ResidualBlock(dim, dim, numerics)
        self.attention = FrameAttention(dim, numerics)
        self.after = ResidualBlock(dim, dim, numerics)

    def __call__(
        self, x: Float[Array, "B F Y X C"], past: Past, sharding: SpatialSharding
    ) -> tuple[Float[Array, "B F Y X C"], Past]:
        before, after = (None, None) if past is None else past
        x, before = self.before(x, before, sharding)
        x = self.attention(sharding.constrain(x), sharding)
        x, after = self.after(x, after, sharding)
        return sharding.constrain(x), (before, after)


class Stage(nnx.Module):
    """Residual blocks at one resolution, then the step to the next one unless it is the last."""

    def __init__(
        self,
        dims: tuple[int, int],
        numerics: Numerics,
        *,
        blocks: int,
        resample: Callable[[Array, Past, SpatialSharding], tuple[Array, Past]] | None,
    ):
        widths = (dims[0], *(dims[1],) * blocks)
        self.resnets = nnx.List(
            [ResidualBlock(widths[i], widths[i + 1], numerics) for i in range(blocks)]
        )
        self.resample = resample

    def __call__(
        self, x: Float[Array, "B F Y X C"], past: Past, sharding: SpatialSharding = WHOLE
    ) -> tuple[Float[Array, "B f y x D"], Past]:
        layers: list[Any] = (
            [*self.resnets] if self.resample is None else [*self.resnets, self.resample]
        )
        seen = []
        for index, layer in enumerate(layers):
            x, layer_past = layer(x, None if past is None else past[index], sharding)
            seen.append(layer_past)
        return x, tuple(seen)


def attend_frame_by_frame(
    q: Float[Array, "B F Y X C"],
    k: Float[Array, "B F Y X C"],
    v: Float[Array, "B F Y X C"],
    sharding: SpatialSharding,
) -> Float[Array, "B F Y X C"]:
    """Softmax attention among the pixels of each frame, one frame and a few rows at a time."""
    batch, frames, height, width, channels = q.shape
    pieces = _row_pieces(batch, height, width, sharding)
    # Rows of one device are next to each other, so the pieces that follow one another in time are
    # taken from within every device's rows: [rows of devices, pieces, rows of a piece].
    grid = (sharding.rows, pieces, height // sharding.rows // pieces)

    def attend(frame: tuple[Array, Array, Array]) -> Array:
        q_BYXC, k_BTC, v_BTC = frame
        q_pieces = jnp.moveaxis(q_BYXC.reshape(batch, *grid, width, channels), 2, 0)
        out = _in_turn(lambda piece: _attend(piece, k_BTC, v_BTC), q_pieces)
        return jnp.moveaxis(out, 0, 2).reshape(q_BYXC.shape)

    k, v = (x.reshape(batch, frames, height * width, channels) for x in (k, v))
    by_frame = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v))
    return jnp.moveaxis(_in_turn(attend, by_frame), 0, 1)


def _attend(
    q: Float[Array, "B R Y X C"], k: Float[Array, "B T C"], v: Float[Array, "B T C"]
) -> Float[Array, "B R Y X C"]:
    """Attention of the given pixels to all of the frame's; the softmax is taken in float32."""
    scores = jnp.einsum("bryxc,btc->bryxt", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * (1 / math.sqrt(q.shape[-1])), axis=-1)
    return jnp.einsum("bryxt,btc->bryxc", weights.astype(v.dtype), v)


def _in_turn(function: Callable[[Any], Array], xs: Any) -> Array:
    """`function` of every item along the first dimension, one after the other."""
    if jax.tree.leaves(xs)[0].shape[0] == 1:
        return function(jax.tree.map(lambda x: x[0], xs))[None]
    return lax.map(function, xs)


def _row_pieces(batch: int, height: int, width: int, sharding: SpatialSharding) -> int:
    """Into how many turns a device's rows go so that it holds at most MOST_SCORES scores."""
    rows = height // sharding.rows
    scores = batch * rows * (width // sharding.columns) * height * width
    return next(
        pieces
        for pieces in range(1, rows + 1)
        if rows % pieces == 0 and (scores // pieces <= MOST_SCORES or pieces == rows)
    )

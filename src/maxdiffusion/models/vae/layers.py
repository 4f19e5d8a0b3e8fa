"""Layers of the causal VAE over [B F Y X C]: convolutions, norm, residual block, frame attention.

A clip is run in chunks of frames. A layer with a receptive field in time returns its result and the
last input frames (its *cache*), and takes the cache with the next chunk. There are two ways to run
the first chunk, which has fewer frames than the others: by itself, with `None` for the caches, or
filled up with empty frames in front and with zeros for the caches, so that all chunks are alike.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from maxdiffusion.models.vae.conv_impl import Padding, convolve_time
from maxdiffusion.models.vae.sharding import WHOLE, SpatialSharding

KERNEL_DIMS = ("time", "height", "width", "channels_in", "channels_out")
HISTORY = 2  # frames that a causal convolution of three taps looks back


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """The types that layers compute in and keep parameters in, and where first values come from."""

    dtype: DTypeLike
    param_dtype: DTypeLike
    rngs: nnx.Rngs


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Frames that are run at once: their sharding, and where among them the clip starts.

    Frames before `start` are empty: their values are of no use, and convolutions take them as
    zeros. It is -1 where an earlier chunk has the clip's first frame; None where no chunk has empty
    frames.
    """

    sharding: SpatialSharding = WHOLE
    start: Int[Array, ""] | None = None

    def doubled(self) -> "Chunk":
        """Returns the chunk with two frames for every frame but the clip's first.

        That frame is the second of its pair, and the first of the pair is empty.
        """
        return self if self.start is None else replace(self, start=2 * self.start + 1)

    def halved(self) -> "Chunk":
        """Returns the chunk with one frame for two; the clip's first is the second of its pair."""
        return self if self.start is None else replace(self, start=(self.start - 1) // 2)

    def after_first(self) -> "Chunk":
        """Returns the chunk with the clip's first frame empty too."""
        return self if self.start is None else replace(self, start=self.start + 1)

    def clear(self, x: Float[Array, "B F Y X C"]) -> Float[Array, "B F Y X C"]:
        """Returns the frames with zeros for the empty ones."""
        if self.start is None:
            return x
        empty = _of_frames(jnp.arange(x.shape[1]) < self.start, x)
        return jnp.where(empty, jnp.zeros_like(x), x)

    def keep_first(
        self, kept: Float[Array, "B F Y X C"], other: Float[Array, "B F Y X C"]
    ) -> Float[Array, "B F Y X C"]:
        """Returns the clip's first frame from `kept` and all others from `other`."""
        assert self.start is not None
        return jnp.where(_of_frames(jnp.arange(kept.shape[1]) == self.start, kept), kept, other)


def _of_frames(flags: Bool[Array, " F"], x: Float[Array, "B F Y X C"]) -> Bool[Array, "B F Y X C"]:
    """Returns a flag of every frame for all values of the frame."""
    return jnp.broadcast_to(flags[:, None, None, None], x.shape)


LONE = Chunk()


class ConvParams(nnx.Module):
    """Weights [..., in, out] and a bias, handed out in the type that is computed in."""

    def __init__(self, shape: tuple[int, ...], numerics: Numerics):
        key, param_dtype = numerics.rngs.params(), numerics.param_dtype
        dims = KERNEL_DIMS[-len(shape) :]
        kernel = nnx.initializers.lecun_normal()(key, shape, param_dtype)
        self.kernel = nnx.Param(kernel, dims=dims)
        self.bias = nnx.Param(jnp.zeros(shape[-1:], param_dtype), dims=dims[-1:])
        self.dtype = numerics.dtype

    def weights(self) -> tuple[Array, Array]:
        """Kernel and bias in the type that is computed in."""
        return self.kernel[...].astype(self.dtype), self.bias[...].astype(self.dtype)


class Pointwise(ConvParams):
    """A convolution of one tap: a matrix product over the channels."""

    def __call__(self, x: Float[Array, "*dims C"]) -> Float[Array, "*dims O"]:
        kernel, bias = self.weights()
        y = x @ kernel.reshape(kernel.shape[-2:])
        return y + jnp.broadcast_to(bias, y.shape)


class FrameConv(ConvParams):
    """A convolution of 3 x 3 taps over every frame by itself."""

    def __call__(
        self,
        x: Float[Array, "B F Y X C"],
        sharding: SpatialSharding = WHOLE,
        *,
        stride: int,
        padding: tuple[int, int],
    ) -> Float[Array, "B F y x O"]:
        """The frames; `padding` zeros are put before and after, along height and along width."""
        kernel, bias = self.weights()

        def convolve(x: Array, _: Array | None, kernel: Array, zeros: Padding) -> Array:
            return convolve_time(
                x, kernel[None], step=1, stride=stride, padding=zeros, stacked=sharding.stacked
            )

        y = sharding.by_piece(convolve, x, kernel, (padding, padding))
        return y + jnp.broadcast_to(bias, y.shape)


class CausalConv(ConvParams):
    """A convolution that sees a frame and the two before it, and zeros around each frame."""

    def __call__(
        self,
        x: Float[Array, "B F Y X C"],
        cache: Float[Array, "B cached y x C"] | None,
        chunk: Chunk = LONE,
    ) -> tuple[Float[Array, "B F Y X O"], Float[Array, "B cached y x C"]]:
        """As many frames as given, and the cache for the next chunk, with borders of pieces."""
        kernel, bias = self.weights()
        sharding = chunk.sharding

        def convolve(
            x: Array, cache: Array | None, kernel: Array, zeros: Padding
        ) -> tuple[Array, Array]:
            window = with_cache(x, cache)
            run = partial(convolve_time, step=1, padding=zeros, stacked=sharding.stacked)
            if cache is None and x.shape[1] == 1:
                # All before a single frame is zero: only the last tap has something to see.
                return run(x, kernel[-1:]), window[:, -HISTORY:]
            return run(window, kernel), window[:, -HISTORY:]

        y, cache = sharding.by_piece(convolve, chunk.clear(x), kernel, same_size(kernel), cache)
        return y + jnp.broadcast_to(bias, y.shape), cache


class HalvingConv(ConvParams):
    """Three taps in time that move by two frames: every result sees frames 2i, 2i+1 and 2i+2."""

    def __call__(
        self, x: Float[Array, "B F Y X C"], sharding: SpatialSharding = WHOLE
    ) -> Float[Array, "B f Y X O"]:
        kernel, bias = self.weights()

        def convolve(x: Array, _: Array | None, kernel: Array, zeros: Padding) -> Array:
            return convolve_time(x, kernel, step=2, padding=zeros, stacked=sharding.stacked)

        y = sharding.by_piece(convolve, x, kernel, same_size(kernel))
        return y + jnp.broadcast_to(bias, y.shape)


def with_cache(
    x: Float[Array, "B F Y X C"], cache: Float[Array, "B cached Y X C"] | None
) -> Float[Array, "B f Y X C"]:
    """The frames with those that a causal convolution looks back at in front."""
    if cache is None:
        return jnp.pad(x, ((0, 0), (HISTORY, 0), (0, 0), (0, 0), (0, 0)))
    return jnp.concatenate([cache, x], axis=1)


def same_size(kernel: Float[Array, "kf ky kx C O"]) -> Padding:
    """Returns the zeros around a frame that keep its size."""
    rows, columns = kernel.shape[1] // 2, kernel.shape[2] // 2
    return (rows, rows), (columns, columns)


# Attention scores that one device holds at a time: 2^26 float32 are 256 MiB. A 720p frame has
# 14,400^2 = 3.1 * 2^26 of them.
MOST_SCORES = 2**26

# Nested tuples of [B cached Y X C] in the order of a layer's own layers.
Cache = Any


class RmsNorm(nnx.Module):
    """Scales the channels of every pixel to unit root mean square, in float32."""

    def __init__(self, dim: int, numerics: Numerics):
        self.gamma = nnx.Param(jnp.ones((dim,), numerics.param_dtype), dims=("channels",))

    def __call__(self, x: Float[Array, "*dims C"]) -> Float[Array, "*dims C"]:
        values = x.astype(jnp.float32)
        squares = jnp.sum(values * values, axis=-1, keepdims=True)
        # The norm is kept above 1e-12, so its square above 1e-24.
        scale = lax.rsqrt(jnp.maximum(squares, 1e-24)) * math.sqrt(x.shape[-1])
        gamma = jnp.broadcast_to(self.gamma[...].astype(jnp.float32), x.shape)
        return (values * scale * gamma).astype(x.dtype)


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
        self, x: Float[Array, "B F Y X C"], cache: Cache, chunk: Chunk = LONE
    ) -> tuple[Float[Array, "B F Y X O"], Cache]:
        cache1, cache2 = (None, None) if cache is None else cache
        y, cache1 = self.conv1(jax.nn.silu(self.norm1(x)), cache1, chunk)
        y, cache2 = self.conv2(jax.nn.silu(self.norm2(y)), cache2, chunk)
        return y + (x if self.shortcut is None else self.shortcut(x)), (cache1, cache2)


def run_equal(
    blocks: Sequence[ResidualBlock], x: Float[Array, "B F Y X C"], cache: Cache, chunk: Chunk
) -> tuple[Float[Array, "B F Y X C"], Cache]:
    """Runs blocks of equal widths one after the other; the compiler sees one of them.

    Their caches are stacked, in front of the batch.
    """
    graph = nnx.graphdef(blocks[0])
    weights = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(nnx.state, blocks))

    def run(x: Array, of_block: tuple[nnx.State, Cache]) -> tuple[Array, Cache]:
        state, cache = of_block
        y, cache = nnx.merge(graph, state)(x, cache, chunk)
        return jax.tree.map(chunk.sharding.constrain, (y, cache))

    return lax.scan(run, x, (weights, cache))


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
        self, x: Float[Array, "B F Y X C"], cache: Cache, chunk: Chunk
    ) -> tuple[Float[Array, "B F Y X C"], Cache]:
        before, after = (None, None) if cache is None else cache
        x, before = self.before(x, before, chunk)
        x = self.attention(chunk.sharding.constrain(x), chunk.sharding)
        x, after = self.after(x, after, chunk)
        return chunk.sharding.constrain(x), (before, after)


# resample(x, cache, chunk) -> frames of the next resolution, cache for the next chunk, their chunk
Resample = Callable[[Array, Cache, Chunk], tuple[Array, Cache, Chunk]]
# shortcut(x, is_first_chunk) -> what is added to the result of a stage
Shortcut = Callable[[Array, bool], Array]


class Stage(nnx.Module):
    """Residual blocks at one resolution, then the step to the next one unless it is the last.

    With a `shortcut` the input of the stage, brought to the size of the result, is added to it.
    """

    def __init__(
        self,
        dims: tuple[int, int],
        numerics: Numerics,
        *,
        blocks: int,
        resample: Resample | None,
        shortcut: Shortcut | None = None,
    ):
        widths = (dims[0], *(dims[1],) * blocks)
        self.resnets = nnx.List(
            [ResidualBlock(widths[i], widths[i + 1], numerics) for i in range(blocks)]
        )
        self.resample = resample
        self.shortcut = shortcut

    def __call__(
        self, x: Float[Array, "B F Y X C"], cache: Cache, chunk: Chunk = LONE
    ) -> tuple[Float[Array, "B f y x O"], Cache, Chunk]:
        """The frames after the stage, the cache for the next chunk, and the chunk of the result."""
        skipped = None if self.shortcut is None else self.shortcut(chunk.clear(x), cache is None)
        widening, equal, resampling = (None,) * 3 if cache is None else cache
        blocks = [*self.resnets]
        if blocks[0].shortcut is not None:
            x, widening = blocks.pop(0)(x, widening, chunk)
        if blocks:
            x, equal = run_equal(blocks, x, equal, chunk)
        if self.resample is not None:
            x, resampling, chunk = self.resample(x, resampling, chunk)
        x = x if skipped is None else x + chunk.sharding.constrain(skipped)
        return x, (widening, equal, resampling), chunk


def attend_frame_by_frame(
    q: Float[Array, "B F Y X C"],
    k: Float[Array, "B F Y X C"],
    v: Float[Array, "B F Y X C"],
    sharding: SpatialSharding,
    *,
    most_scores: int = MOST_SCORES,
) -> Float[Array, "B F Y X C"]:
    """Softmax attention among the pixels of each frame, one frame and a few rows at a time."""
    batch, frames, height, width, channels = q.shape
    pieces = _row_pieces(batch, height, width, sharding, most_scores)
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
    q: Float[Array, "B strips Y X C"], k: Float[Array, "B T C"], v: Float[Array, "B T C"]
) -> Float[Array, "B strips Y X C"]:
    """Attention of the given pixels to all of the frame's; the softmax is taken in float32."""
    scores = jnp.einsum("bryxc,btc->bryxt", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * (1 / math.sqrt(q.shape[-1])), axis=-1)
    return jnp.einsum("bryxt,btc->bryxc", weights.astype(v.dtype), v)


def _in_turn(function: Callable[[Any], Array], xs: Any) -> Array:
    """`function` of every item along the first dimension, one after the other."""
    if jax.tree.leaves(xs)[0].shape[0] == 1:
        return function(jax.tree.map(lambda x: x[0], xs))[None]
    return lax.map(function, xs)


def _row_pieces(
    batch: int, height: int, width: int, sharding: SpatialSharding, most_scores: int
) -> int:
    """Returns the number of turns in which a device holds at most `most_scores` scores."""
    rows = height // sharding.rows
    scores = batch * rows * (width // sharding.columns) * height * width
    return next(
        pieces
        for pieces in range(1, rows + 1)
        if rows % pieces == 0 and (scores // pieces <= most_scores or pieces == rows)
    )

"""Layers that convolve [B F Y X C]: causal in time with the frames before, and frame by frame.

A clip is run in chunks of frames. Every layer that looks back in time returns, beside its result,
the last frames it saw (its *past*), and takes them again with the next chunk; `None` is the past of
the first chunk, before which there is nothing but zeros.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from maxdiffusion.models.vae.sharding import WHOLE, Padding, SpatialSharding
from maxdiffusion.models.vae.sums import convolve_frames, convolve_time

KERNEL_DIMS = ("time", "height", "width", "channels_in", "channels_out")
HISTORY = 2  # frames that a causal convolution of three taps looks back


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """The types that layers compute in and keep parameters in, and where first values come from."""

    dtype: DTypeLike
    param_dtype: DTypeLike
    rngs: nnx.Rngs


class Kernel(nnx.Module):
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


class Pointwise(Kernel):
    """A convolution of one tap: a matrix product over the channels."""

    def __call__(self, x: Float[Array, "*dims C"]) -> Float[Array, "*dims D"]:
        kernel, bias = self.weights()
        return x @ kernel.reshape(kernel.shape[-2:]) + bias


class FrameConv(Kernel):
    """A convolution of 3 x 3 taps over every frame by itself."""

    def __call__(
        self,
        x: Float[Array, "B F Y X C"],
        sharding: SpatialSharding = WHOLE,
        *,
        stride: int,
        padding: tuple[int, int],
    ) -> Float[Array, "B F y x D"]:
        """The frames; `padding` zeros are put before and after, along height and along width."""
        kernel, bias = self.weights()

        def convolve(x: Array, kernel: Array, zeros: Padding) -> Array:
            if stride == 1:
                return convolve_time(x, kernel[None], step=1, padding=zeros)
            return convolve_frames(x, kernel, stride=stride, padding=zeros)

        return sharding.by_piece(convolve, x, kernel, (padding, padding)) + bias


class CausalConv(Kernel):
    """A convolution that sees a frame and the two before it, and zeros around each frame."""

    def __call__(
        self,
        x: Float[Array, "B F Y X C"],
        past: Float[Array, "B K Y X C"] | None,
        sharding: SpatialSharding = WHOLE,
    ) -> tuple[Float[Array, "B F Y X D"], Float[Array, "B K Y X C"]]:
        """As many frames as given, and the past for the next chunk."""
        kernel, bias = self.weights()
        seen = with_past(x, past)
        if past is None and x.shape[1] == 1:
            # All before a single frame is zero: only the last tap in time has something to see.
            y = convolve_pieces(x, kernel[-1:], sharding, step=1)
        else:
            y = convolve_pieces(seen, kernel, sharding, step=1)
        return y + bias, seen[:, -HISTORY:]


class HalvingConv(Kernel):
    """Three taps in time that move by two frames: every result sees frames 2i, 2i+1 and 2i+2."""

    def __call__(
        self, x: Float[Array, "B F Y X C"], sharding: SpatialSharding = WHOLE
    ) -> Float[Array, "B f Y X D"]:
        kernel, bias = self.weights()
        return convolve_pieces(x, kernel, sharding, step=2) + bias


def with_past(
    x: Float[Array, "B F Y X C"], past: Float[Array, "B K Y X C"] | None
) -> Float[Array, "B f Y X C"]:
    """The frames with those that a causal convolution looks back at in front."""
    if past is None:
        return jnp.pad(x, ((0, 0), (HISTORY, 0), (0, 0), (0, 0), (0, 0)))
    return jnp.concatenate([past, x], axis=1)


def convolve_pieces(
    x: Float[Array, "B F Y X C"],
    kernel: Float[Array, "K Ky Kx C D"],
    sharding: SpatialSharding,
    *,
    step: int,
) -> Float[Array, "B f Y X D"]:
    """`convolve_time` with zeros that keep the size of a frame, each device over its own piece."""
    rows, columns = kernel.shape[1] // 2, kernel.shape[2] // 2

    def convolve(x: Array, kernel: Array, zeros: Padding) -> Array:
        return convolve_time(x, kernel, step=step, padding=zeros)

    return sharding.by_piece(convolve, x, kernel, ((rows, rows), (columns, columns)))

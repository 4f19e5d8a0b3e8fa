"""Convolutions over [B F Y X C]: causal in time with the frames that went before, and per frame.

A clip is run in chunks of frames. Every layer that looks back in time returns, beside its result,
the last frames it saw (its *past*), and takes them again with the next chunk; `None` is the past of
the first chunk, before which there is nothing but zeros.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

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
        self, x: Float[Array, "B F Y X C"], *, stride: int, padding: tuple[int, int]
    ) -> Float[Array, "B F y x D"]:
        """The frames; `padding` zeros are put before and after, along height and along width."""
        kernel, bias = self.weights()
        return _convolve(x, kernel[None], (1, stride, stride), ((0, 0), padding, padding)) + bias


class CausalConv(Kernel):
    """A convolution that sees a frame and the two before it, and zeros around each frame."""

    def __call__(
        self, x: Float[Array, "B F Y X C"], past: Float[Array, "B K Y X C"] | None
    ) -> tuple[Float[Array, "B F Y X D"], Float[Array, "B K Y X C"]]:
        """As many frames as given, and the past for the next chunk."""
        kernel, bias = self.weights()
        rows, columns = kernel.shape[1] // 2, kernel.shape[2] // 2
        seen = with_past(x, past)
        y = _convolve(seen, kernel, (1, 1, 1), ((0, 0), (rows, rows), (columns, columns))) + bias
        return y, seen[:, -HISTORY:]


class HalvingConv(Kernel):
    """Three taps in time that move by two frames: every result sees frames 2i, 2i+1 and 2i+2."""

    def __call__(self, x: Float[Array, "B F Y X C"]) -> Float[Array, "B f Y X D"]:
        kernel, bias = self.weights()
        return _convolve(x, kernel, (2, 1, 1), ((0, 0), (0, 0), (0, 0))) + bias


def with_past(
    x: Float[Array, "B F Y X C"], past: Float[Array, "B K Y X C"] | None
) -> Float[Array, "B f Y X C"]:
    """The frames with those that a causal convolution looks back at in front."""
    if past is None:
        return jnp.pad(x, ((0, 0), (HISTORY, 0), (0, 0), (0, 0), (0, 0)))
    return jnp.concatenate([past, x], axis=1)


def _convolve(
    x: Array, kernel: Array, strides: tuple[int, ...], padding: tuple[tuple[int, int], ...]
) -> jax.Array:
    """The bare convolution of [B F Y X C] with [K K K C D]."""
    return lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=("NDHWC", "DHWIO", "NDHWC")
    )

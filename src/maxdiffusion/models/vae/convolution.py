"""Convolutions over [B F Y X C]: causal in time with the frames that went before, and per frame.

A clip is run in chunks of frames. Every layer that looks back in time returns, beside its result,
the last frames it saw (its *past*), and takes them again with the next chunk; `None` is the past of
the first chunk, before which there is nothing but zeros.
"""

from dataclasses import dataclass
from functools import partial

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
        return convolve_frames(x, kernel, stride=stride, padding=(padding, padding)) + bias


class CausalConv(Kernel):
    """A convolution that sees a frame and the two before it, and zeros around each frame."""

    def __call__(
        self, x: Float[Array, "B F Y X C"], past: Float[Array, "B K Y X C"] | None
    ) -> tuple[Float[Array, "B F Y X D"], Float[Array, "B K Y X C"]]:
        """As many frames as given, and the past for the next chunk."""
        kernel, bias = self.weights()
        seen = with_past(x, past)
        if past is None and x.shape[1] == 1:
            # All before a single frame is zero: only the last tap in time has something to see.
            return convolve_time(x, kernel[-1:], step=1) + bias, seen[:, -HISTORY:]
        return convolve_time(seen, kernel, step=1) + bias, seen[:, -HISTORY:]


class HalvingConv(Kernel):
    """Three taps in time that move by two frames: every result sees frames 2i, 2i+1 and 2i+2."""

    def __call__(self, x: Float[Array, "B F Y X C"]) -> Float[Array, "B f Y X D"]:
        kernel, bias = self.weights()
        return convolve_time(x, kernel, step=2) + bias


def with_past(
    x: Float[Array, "B F Y X C"], past: Float[Array, "B K Y X C"] | None
) -> Float[Array, "B f Y X C"]:
    """The frames with those that a causal convolution looks back at in front."""
    if past is None:
        return jnp.pad(x, ((0, 0), (HISTORY, 0), (0, 0), (0, 0), (0, 0)))
    return jnp.concatenate([past, x], axis=1)


def convolve_time(
    x: Float[Array, "B F Y X C"], kernel: Float[Array, "K Ky Kx C D"], *, step: int
) -> Float[Array, "B f Y X D"]:
    """Windows of K frames, `step` frames apart; frames keep their size.

    XLA runs convolutions over three dimensions well on accelerators. Its CPU back end runs them on
    one thread, 10 to 18 times slower than the same sums over two dimensions (64 x 64 pixels, 16
    channels, float32, 2 cores), so there the taps in time are laid out as channels.
    """
    return lax.platform_dependent(
        x,
        kernel,
        cpu=partial(convolve_folded, step=step),
        default=partial(convolve_volume, step=step),
    )


def convolve_volume(
    x: Float[Array, "B F Y X C"], kernel: Float[Array, "K Ky Kx C D"], *, step: int
) -> Float[Array, "B f Y X D"]:
    """`convolve_time` as one convolution over three dimensions."""
    return lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(step, 1, 1),
        padding=((0, 0), *_around(kernel)),
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
    )


def convolve_folded(
    x: Float[Array, "B F Y X C"], kernel: Float[Array, "K Ky Kx C D"], *, step: int
) -> Float[Array, "B f Y X D"]:
    """`convolve_time` over frames one by one, the K of a window side by side as channels."""
    taps, rows, columns, channels, out = kernel.shape
    count = (x.shape[1] - taps) // step + 1
    windows = [x[:, tap : tap + (count - 1) * step + 1 : step] for tap in range(taps)]
    folded = jnp.moveaxis(kernel, 0, 2).reshape(rows, columns, taps * channels, out)
    return convolve_frames(
        jnp.concatenate(windows, axis=-1), folded, stride=1, padding=_around(kernel)
    )


def convolve_frames(
    x: Float[Array, "B F Y X C"],
    kernel: Float[Array, "Ky Kx C D"],
    *,
    stride: int,
    padding: tuple[tuple[int, int], tuple[int, int]],
) -> Float[Array, "B F y x D"]:
    """A convolution over height and width of every frame."""
    frames = x.reshape(-1, *x.shape[2:])
    y = lax.conv_general_dilated(
        frames, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y.reshape(*x.shape[:2], *y.shape[1:])


def _around(kernel: Array) -> tuple[tuple[int, int], tuple[int, int]]:
    """Zeros before and after height and width that keep the size of a frame."""
    rows, columns = kernel.shape[1] // 2, kernel.shape[2] // 2
    return (rows, rows), (columns, columns)

"""Convolutions over [B F Y X C] on one device, in the form that each compiler handles best."""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from maxdiffusion.models.vae.sharding import Padding


def convolve_time(
    x: Float[Array, "B F Y X C"],
    kernel: Float[Array, "kf ky kx C O"],
    *,
    step: int,
    stride: int = 1,
    padding: Padding,
) -> Float[Array, "B f y x O"]:
    """Convolves windows of K frames, `step` apart, and in every frame squares `stride` apart.

    `padding` zeros go around height and width.

    XLA is slow with convolutions over three dimensions. Its CPU back end runs them on one thread,
    10 to 18 times slower than the same sums over two (64 x 64 pixels, 16 channels, float32, 2
    cores). Its TPU back end takes minutes to compile one and adds layout copies around it.
    """
    forms = {"cpu": convolve_folded, "default": convolve_columns}
    bound = {
        name: partial(form, step=step, stride=stride, padding=padding)
        for name, form in forms.items()
    }
    return lax.platform_dependent(x, kernel, **bound)


def convolve_volume(
    x: Float[Array, "B F Y X C"],
    kernel: Float[Array, "kf ky kx C O"],
    *,
    step: int,
    stride: int = 1,
    padding: Padding,
) -> Float[Array, "B f y x O"]:
    """Reference of `convolve_time`: one convolution over three dimensions."""
    return lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(step, stride, stride),
        padding=((0, 0), *padding),
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
    )


def convolve_folded(
    x: Float[Array, "B F Y X C"],
    kernel: Float[Array, "kf ky kx C O"],
    *,
    step: int,
    stride: int = 1,
    padding: Padding,
) -> Float[Array, "B f y x O"]:
    """Computes `convolve_time` frame by frame, with the K of a window side by side as channels."""
    taps, rows, columns, channels, out = kernel.shape
    count = (x.shape[1] - taps) // step + 1
    windows = [x[:, tap : tap + (count - 1) * step + 1 : step] for tap in range(taps)]
    folded = jnp.moveaxis(kernel, 0, 2).reshape(rows, columns, taps * channels, out)
    return convolve_frames(
        jnp.concatenate(windows, axis=-1), folded, stride=stride, padding=padding
    )


def convolve_columns(
    x: Float[Array, "B F Y X C"],
    kernel: Float[Array, "kf ky kx C O"],
    *,
    step: int,
    stride: int = 1,
    padding: Padding,
) -> Float[Array, "B f y x O"]:
    """Computes `convolve_time` over frames and rows, for all columns at once.

    The taps along a row are channels. The window then moves only along dimensions that are not
    tiled, so the MXU reads its operands in place: 4 frames of 360 x 320 pixels and 96 channels take
    2.8 million cycles on TPU7x. docs/design/vae_programs.md compares it with other forms.
    """
    taps, rows, columns, channels, out = kernel.shape
    zeros = jnp.pad(x, ((0, 0), (0, 0), *padding, (0, 0)))
    width = (zeros.shape[3] - columns) // stride + 1
    span = (width - 1) * stride + 1
    stacked = jnp.concatenate(
        [zeros[:, :, :, column : column + span : stride] for column in range(columns)], axis=-1
    )
    by_row = jnp.moveaxis(stacked, 0, 2)
    frames, height, batch, *_ = by_row.shape
    y = lax.conv_general_dilated(
        by_row.reshape(frames, height, batch * width, columns * channels),
        kernel.reshape(taps, rows, columns * channels, out),
        window_strides=(step, stride),
        padding=((0, 0), (0, 0)),
        dimension_numbers=("HWNC", "HWIO", "HWNC"),
    )
    return jnp.moveaxis(y.reshape(*y.shape[:2], batch, width, out), 2, 0)


def convolve_frames(
    x: Float[Array, "B F Y X C"],
    kernel: Float[Array, "ky kx C O"],
    *,
    stride: int,
    padding: Padding,
) -> Float[Array, "B F y x O"]:
    """Convolves every frame over its height and width."""
    frames = x.reshape(-1, *x.shape[2:])
    y = lax.conv_general_dilated(
        frames, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y.reshape(*x.shape[:2], *y.shape[1:])

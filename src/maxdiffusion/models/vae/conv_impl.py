"""Convolutions over [B F Y X C] on one device, in the form that each compiler handles best."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

# Zeros before and after the height, and before and after the width.
Padding = tuple[tuple[int, int], tuple[int, int]]
LANES = 128
ROWS, COLUMNS = 2, 3  # dimensions of [B F Y X C]


def convolve_time(
    x: Float[Array, "B F Y X C"],
    kernel: Float[Array, "kf ky kx C O"],
    *,
    step: int,
    stride: int = 1,
    padding: Padding,
    stacked: int | None = None,
) -> Float[Array, "B f y x O"]:
    """Convolves windows of K frames, `step` apart, and in every frame squares `stride` apart.

    `padding` zeros go around height and width. `stacked` is the dimension whose taps become
    channels on a TPU, 2 for rows or 3 for columns; None chooses one.

    XLA is slow with convolutions over three dimensions. Its CPU back end runs them on one thread,
    10 to 18 times slower than the same sums over two (64 x 64 pixels, 16 channels, float32, 2
    cores). Its TPU back end takes minutes to compile one and adds layout copies around it.
    """
    forms = {"tpu": convolve_stacked, "default": convolve_folded}
    bound = {
        name: partial(form, step=step, stride=stride, padding=padding, stacked=stacked)
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
    stacked: int | None = None,
) -> Float[Array, "B f y x O"]:
    """Reference of `convolve_time`: one convolution over three dimensions."""
    del stacked
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
    stacked: int | None = None,
) -> Float[Array, "B f y x O"]:
    """Computes `convolve_time` frame by frame, with the K of a window side by side as channels."""
    del stacked
    taps, rows, columns, channels, out = kernel.shape
    count = (x.shape[1] - taps) // step + 1
    windows = [x[:, tap : tap + (count - 1) * step + 1 : step] for tap in range(taps)]
    folded = jnp.moveaxis(kernel, 0, 2).reshape(rows, columns, taps * channels, out)
    return convolve_frames(
        jnp.concatenate(windows, axis=-1), folded, stride=stride, padding=padding
    )


def convolve_stacked(
    x: Float[Array, "B F Y X C"],
    kernel: Float[Array, "kf ky kx C O"],
    *,
    step: int,
    stride: int = 1,
    padding: Padding,
    stacked: int | None = None,
) -> Float[Array, "B f y x O"]:
    """Computes `convolve_time` with the taps along columns, or along rows, as channels."""
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    exact = precision not in (None, "default", "bfloat16")
    dim = _stacked_dim(x, stacked)
    written = lax.optimization_barrier(_on_tpu(x, dim)) if exact else _written(dim, x)
    convolve = _convolve_rows if dim == ROWS else _convolve_columns
    y = convolve(written, kernel, step=step, stride=stride, padding=padding)
    return _on_tpu(y, dim)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _written(dim: int, x: Float[Array, "B F Y X C"]) -> Float[Array, "B F Y X C"]:
    """Returns an operand as the MXU rounds it; the compiler writes it to memory in that type.

    It would otherwise fuse borders and cached frames with the stack of taps into the convolution,
    which then computes them for every tap: 4.3 instead of 2.9 million cycles.
    """
    return lax.optimization_barrier(_on_tpu(x.astype(jnp.bfloat16), dim)).astype(x.dtype)


@_written.defjvp
def _written_jvp(
    dim: int, primals: tuple[Float[Array, "B F Y X C"]], tangents: tuple[Float[Array, "B F Y X C"]]
) -> tuple[Float[Array, "B F Y X C"], Float[Array, "B F Y X C"]]:
    """Returns the tangents as they are: the rounding is that of the product."""
    return _written(dim, *primals), tangents[0]


def placed(x: Float[Array, "B F Y X C"], stacked: int | None = None) -> Float[Array, "B F Y X C"]:
    """Returns frames in the order that the convolutions of a TPU read them in.

    Left alone, the compiler puts the dimension first that borders or cached frames are joined
    along, and copies between these orders take longer than the convolutions.
    """
    on_tpu = partial(_on_tpu, dim=_stacked_dim(x, stacked))
    return lax.platform_dependent(x, tpu=on_tpu, default=lambda x: x)


def _on_tpu(x: Float[Array, "B F Y X C"], dim: int) -> Float[Array, "B F Y X C"]:
    """Returns frames with channels in lanes, or in sublanes if there are fewer than lanes.

    The dimension whose taps become channels is the other one of the two.
    """
    other = COLUMNS if dim == ROWS else ROWS
    inner = (dim, 4) if x.shape[-1] >= LANES else (4, dim)
    return with_layout_constraint(x, Layout(major_to_minor=(0, 1, other, *inner)))


def _stacked_dim(x: Float[Array, "B F Y X C"], stacked: int | None) -> int:
    """Returns the dimension whose taps become channels: the one that fills lanes better.

    Among 360 rows and 320 columns it is the rows: both take 384 lanes.
    """
    rows, columns, channels = x.shape[2:]
    if stacked is not None:
        return stacked
    return ROWS if channels < LANES and _lane_use(rows) > _lane_use(columns) else COLUMNS


def _convolve_columns(
    x: Float[Array, "B F Y X C"],
    kernel: Float[Array, "kf ky kx C O"],
    *,
    step: int,
    stride: int,
    padding: Padding,
) -> Float[Array, "B f y x O"]:
    """Convolves over frames and rows, for all columns at once.

    The taps along a row are channels. The window then moves only along dimensions that are not
    tiled, so the MXU reads its operands in place. docs/design/vae_programs.md compares it with
    other forms.
    """
    taps, rows, columns, channels, out = kernel.shape
    by_row = jnp.moveaxis(_stack(x, 3, columns, stride, padding[1]), 0, 2)
    frames, height, batch, width, _ = by_row.shape
    y = lax.conv_general_dilated(
        by_row.reshape(frames, height, batch * width, columns * channels),
        kernel.reshape(taps, rows, columns * channels, out),
        window_strides=(step, stride),
        padding=((0, 0), padding[0]),
        dimension_numbers=("HWNC", "HWIO", "HWNC"),
    )
    return jnp.moveaxis(y.reshape(*y.shape[:2], batch, width, out), 2, 0)


def _convolve_rows(
    x: Float[Array, "B F Y X C"],
    kernel: Float[Array, "kf ky kx C O"],
    *,
    step: int,
    stride: int,
    padding: Padding,
) -> Float[Array, "B f y x O"]:
    """Convolves over frames and columns, for all rows at once, with taps of rows as channels."""
    taps, rows, columns, channels, out = kernel.shape
    by_frame = jnp.moveaxis(_stack(x, 2, rows, stride, padding[0]), 0, 1)
    frames, batch, height, width, _ = by_frame.shape
    y = lax.conv_general_dilated(
        by_frame.reshape(frames, batch * height, width, rows * channels),
        jnp.moveaxis(kernel, 1, 2).reshape(taps, columns, rows * channels, out),
        window_strides=(step, stride),
        padding=((0, 0), padding[1]),
        dimension_numbers=("HNWC", "HWIO", "HNWC"),
    )
    return jnp.moveaxis(y.reshape(y.shape[0], batch, height, *y.shape[2:]), 1, 0)


def _stack(
    x: Float[Array, "B F Y X C"], dim: int, taps: int, stride: int, zeros: tuple[int, int]
) -> Array:
    """Returns windows of `taps` along a dimension with zeros, `stride` apart, as channels."""
    x = jnp.pad(x, [zeros if side == dim else (0, 0) for side in range(x.ndim)])
    span = (x.shape[dim] - taps) // stride * stride + 1
    windows = [lax.slice_in_dim(x, tap, tap + span, stride=stride, axis=dim) for tap in range(taps)]
    return jnp.concatenate(windows, axis=-1)


def _lane_use(size: int) -> float:
    """Returns the share of lanes that a dimension of this size fills."""
    return size / (-(-size // LANES) * LANES)


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

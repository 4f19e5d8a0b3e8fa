"""Spatial sharding of frames over rows and columns of devices, with halo exchange."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.models.vae.conv_impl import COLUMNS, ROWS, Padding, placed

AXES = ("batch", "redundant", "rows", "columns")
PIECES = PartitionSpec("batch", None, "rows", "columns")
LEAST_LATENTS = 2  # pieces of one latent send as much to their neighbours as they have


@dataclass(frozen=True, kw_only=True)
class SpatialSharding:
    """Frames in rows x columns of equal pieces; the default keeps them whole, on one device.

    `height` and `width` are those of a latent frame. The pieces stay equal at every resolution,
    because all others are whole multiples of it.
    """

    mesh: Mesh | None = None
    asked: int = 1  # devices that should share a frame
    height: int = 0
    width: int = 0

    @classmethod
    def over(
        cls, devices: Sequence[jax.Device], vae_spatial: int, *, batch: int, height: int, width: int
    ) -> "SpatialSharding":
        """Returns the finest equal split of a latent frame over `vae_spatial` devices (-1: all).

        Devices keep their order, so the result works in one program with any other mesh over them;
        such a program states its `out_shardings`, which jax names in the axes of one mesh only.
        Devices beyond those that share a frame take other videos of the batch, or repeat the work.
        """
        count = len(devices)
        asked = count if vae_spatial == -1 else vae_spatial
        if asked < 1 or count % asked:
            raise ProblemsFound([_not_a_divisor(vae_spatial, count)])
        rows, columns = split(asked, height, width)
        replicas = count // (rows * columns)
        videos = math.gcd(replicas, batch)
        grid = np.array(devices).reshape(videos, replicas // videos, rows, columns)
        mesh = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
        return cls(mesh=mesh, asked=asked, height=height, width=width)

    @property
    def rows(self) -> int:
        """Returns the number of pieces of the height."""
        return 1 if self.mesh is None else self.mesh.shape["rows"]

    @property
    def columns(self) -> int:
        """Returns the number of pieces of the width."""
        return 1 if self.mesh is None else self.mesh.shape["columns"]

    @property
    def stacked(self) -> int | None:
        """Returns the side of a frame that is whole if the other one is cut; see `convolve_time`.

        The borders of a piece are then joined along a dimension that is not tiled.
        """
        if (self.rows == 1) == (self.columns == 1):
            return None
        return ROWS if self.rows == 1 else COLUMNS

    def resized(self, *, height: int, width: int) -> "SpatialSharding":
        """Returns the split for latent frames of another size, over the same devices."""
        if self.mesh is None or (height, width) == (self.height, self.width):
            return self
        devices = self.mesh.devices.flatten().tolist()
        batch = self.mesh.shape["batch"]
        return SpatialSharding.over(devices, self.asked, batch=batch, height=height, width=width)

    def constrain(self, x: Float[Array, "*dims B F Y X C"]) -> Float[Array, "*dims B F Y X C"]:
        """Returns the frames, each cut into its pieces; caches may be stacked along layers."""
        if self.mesh is None or self.mesh.size == 1:
            return x
        height, width = x.shape[-3:-1]
        if height % self.rows or width % self.columns:
            raise ProblemsFound([self._does_not_fit(height, width)])
        return self._place(x, PartitionSpec(*(None,) * (x.ndim - 5), *PIECES))

    def gather(self, x: Float[Array, "B F Y X C"]) -> Float[Array, "B F Y X C"]:
        """Returns the frames, each whole on every device."""
        if self.mesh is None or self.mesh.size == 1:
            return x
        return self._place(x, PartitionSpec("batch"))

    def by_piece(
        self,
        convolve: Callable[[Array, Array | None, Array, Padding], Any],
        x: Float[Array, "B F Y X C"],
        kernel: Array,
        padding: Padding,
        cache: Float[Array, "B cached y x C"] | None = None,
    ) -> Any:
        """Runs `convolve(x, cache, kernel, padding)` on each device over its piece with borders.

        XLA's partitioner (jaxlib 0.10.2) gives wrong sums for convolutions over small pieces, and
        exchanges borders for every tap; here they are exchanged once. All results are pieces. A
        cache among them keeps the borders of its frames, so that they are not exchanged again.
        Where a program is lowered under a mesh it must be this one.
        """
        if self.mesh is None or self.mesh.size == 1:
            return convolve(x, cache, kernel, padding)
        rows, columns = padding
        zeros = (rows if self.rows == 1 else (0, 0), columns if self.columns == 1 else (0, 0))

        def piece(x: Array, cache: Array | None, kernel: Array) -> Any:
            x = placed(x, self.stacked)
            if self.rows > 1:
                x = _with_borders(x, ROWS, "rows", self.rows, rows)
            if self.columns > 1:
                x = _with_borders(x, COLUMNS, "columns", self.columns, columns)
            return convolve(x, cache, kernel, zeros)

        specs = (PIECES, PIECES, PartitionSpec())
        run = jax.shard_map(
            piece, mesh=self.mesh, in_specs=specs, out_specs=PIECES, check_vma=False
        )
        return run(self.constrain(x), cache, kernel)

    def describe(self) -> str:
        """Returns one line: the pieces, the devices, and why they are fewer than asked for."""
        if self.mesh is None:
            return "VAE: frames whole, on one device"
        pieces = self.rows * self.columns
        size = f"{self.height // self.rows}x{self.width // self.columns}"
        line = (
            f"VAE: latent frames of {self.height}x{self.width} in {self.rows}x{self.columns} "
            f"pieces of {size} on {self.mesh.size} devices"
        )
        if pieces < self.asked:
            line += f"; {self.asked} devices were asked for, {pieces} is the finest equal split"
        if self.mesh.shape["batch"] > 1:
            line += f"; {self.mesh.shape['batch']} videos of the batch at a time"
        if self.mesh.shape["redundant"] > 1:
            line += f"; every piece is computed by {self.mesh.shape['redundant']} devices"
        return line

    def _place(self, x: Array, spec: PartitionSpec) -> Array:
        assert self.mesh is not None
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def _does_not_fit(self, height: int, width: int) -> Problem:
        return Problem(
            name="frame size",
            value=(height, width),
            rule=f"the split is {self.rows}x{self.columns}, made for latents of "
            f"{self.height}x{self.width}, and does not divide it",
            remedy="Make the SpatialSharding for the size that is run",
        )


WHOLE = SpatialSharding()


def _with_borders(x: Array, dim: int, axis: str, count: int, sizes: tuple[int, int]) -> Array:
    """Returns a piece with the nearest rows (or columns) of its neighbours, zeros at the edges."""
    before, after = sizes
    length, last = x.shape[dim], count - 1
    parts = [x]
    if before:
        nearest = lax.slice_in_dim(x, length - before, length, axis=dim)
        parts.insert(0, _sent(nearest, dim, axis, [(i, i + 1) for i in range(last)]))
    if after:
        nearest = lax.slice_in_dim(x, 0, after, axis=dim)
        parts.append(_sent(nearest, dim, axis, [(i + 1, i) for i in range(last)]))
    return jnp.concatenate(parts, axis=dim)


def _sent(x: Array, dim: int, axis: str, pairs: list[tuple[int, int]]) -> Array:
    """Returns what a neighbour sends; zeros where there is none.

    A single row or column is sent without its dimension, which would fill one of 128 lanes.
    """
    if x.shape[dim] > 1:
        return lax.ppermute(x, axis, pairs)
    return jnp.expand_dims(lax.ppermute(jnp.squeeze(x, dim), axis, pairs), dim)


def split(devices: int, height: int, width: int) -> tuple[int, int]:
    """Returns rows and columns of the finest equal split whose piece count divides `devices`.

    Pieces have at least LEAST_LATENTS latents along a cut. Among equally fine splits it is one that
    cuts a single side if there is any, since a TPU exchanges borders of the side in its lanes
    slowly, and then the one that exchanges the fewest pixels along the cuts.
    """
    grids = [
        (rows, columns)
        for rows in _cuts(height, devices)
        for columns in _cuts(width, devices // rows)
        if devices % (rows * columns) == 0
    ]

    def border(rows: int, columns: int) -> float:
        # A piece in the middle has two neighbours along a dimension cut in three or more.
        return min(rows - 1, 2) * width / columns + min(columns - 1, 2) * height / rows

    def order(grid: tuple[int, int]) -> tuple[int, bool, float, tuple[int, int]]:
        rows, columns = grid
        return -rows * columns, min(rows, columns) > 1, border(rows, columns), grid

    return min(grids, key=order)


def _cuts(size: int, most: int) -> list[int]:
    """Returns the number of equal pieces, up to `most`, that a side of `size` latents has."""
    return [
        count
        for count in range(1, most + 1)
        if size % count == 0 and (count == 1 or size // count >= LEAST_LATENTS)
    ]


def _not_a_divisor(vae_spatial: int, count: int) -> Problem:
    return Problem(
        name="vae_spatial",
        value=vae_spatial,
        rule=f"must divide the number of devices, {count}, or be -1 for all of them",
        remedy=f"Use one of {[size for size in range(1, count + 1) if count % size == 0]}",
    )

"""Decoding and encoding in overlapping tiles, blended where they overlap."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from maxdiffusion.errors import Problem, ProblemsFound

Grid = list[list[Array]]


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Sizes of tiles and steps from one to the next, in pixels of the video."""

    tile_height: int = 256
    tile_width: int = 256
    stride_height: int = 192
    stride_width: int = 192

    def __post_init__(self) -> None:
        problems = [
            Problem(name=field.name, value=size, rule="must be a positive integer")
            for field in fields(self)
            if not isinstance(size := getattr(self, field.name), int) or size < 1
        ]
        problems += [
            Problem(
                name=f"stride_{side}",
                value=stride,
                rule=f"must not exceed tile_{side}={tile}, or pixels are left out",
                remedy=f"Use at most {tile}",
            )
            for side, tile, stride in (
                ("height", self.tile_height, self.stride_height),
                ("width", self.tile_width, self.stride_width),
            )
            if not problems and stride > tile
        ]
        if problems:
            raise ProblemsFound(problems)

    def divided(self, factor: int) -> "Tiling":
        """Returns the same tiles measured in latents, or folded pixels, of `factor` pixels each."""
        problems = [
            Problem(
                name=field.name,
                value=getattr(self, field.name),
                rule=f"must be a multiple of {factor}, the pixels of one latent",
                remedy=f"Use {-(-getattr(self, field.name) // factor) * factor}",
            )
            for field in fields(self)
            if getattr(self, field.name) % factor
        ]
        if problems:
            raise ProblemsFound(problems)
        return Tiling(**{field.name: getattr(self, field.name) // factor for field in fields(self)})

    def covers(self, height: int, width: int) -> bool:
        """Returns whether one tile holds the whole frame."""
        return height <= self.tile_height and width <= self.tile_width

    def cut(self, x: Float[Array, "B F Y X C"]) -> Grid:
        """Returns the tiles, row by row; those at the bottom and right may be smaller."""
        return [
            [
                x[:, :, top : top + self.tile_height, left : left + self.tile_width]
                for left in range(0, x.shape[3], self.stride_width)
            ]
            for top in range(0, x.shape[2], self.stride_height)
        ]

    def join(self, grid: Grid) -> Float[Array, "B F Y X C"]:
        """Returns the frames that the tiles cover, faded from tile to tile where they overlap.

        Every tile is faded from the one above and then from the one on the left, both of which have
        been faded before: the order matters where four tiles meet.
        """
        blended: Grid = []
        for row in grid:
            faded: list[Array] = []
            for column, tile in enumerate(row):
                if blended:
                    tile = fade(blended[-1][column], tile, 2, self.tile_height - self.stride_height)
                if faded:
                    tile = fade(faded[-1], tile, 3, self.tile_width - self.stride_width)
                faded.append(tile)
            blended.append(faded)
        bands = [
            jnp.concatenate(
                [tile[:, :, : self.stride_height, : self.stride_width] for tile in row], axis=3
            )
            for row in blended
        ]
        return jnp.concatenate(bands, axis=2)


def fade(before: Array, after: Array, dim: int, overlap: int) -> Array:
    """Returns `after`, its first `overlap` lines along `dim` mixed with the last of `before`."""
    overlap = min(overlap, before.shape[dim], after.shape[dim])
    if overlap == 0:
        return after
    shape = [1] * after.ndim
    shape[dim] = overlap
    weight = (jnp.arange(overlap, dtype=jnp.float32) / overlap).astype(after.dtype).reshape(shape)
    size = before.shape[dim]
    tail = lax.slice_in_dim(before, size - overlap, size, axis=dim)
    head = lax.slice_in_dim(after, 0, overlap, axis=dim)
    rest = lax.slice_in_dim(after, overlap, after.shape[dim], axis=dim)
    return jnp.concatenate([tail * (1 - weight) + head * weight, rest], axis=dim)


def map_tiles(function: Callable[[Array], Array], grid: Grid) -> Grid:
    """Returns `function` of every tile; tiles of one shape go through one compiled loop."""
    flat = [tile for row in grid for tile in row]
    done: dict[int, Array] = {}
    for shape in dict.fromkeys(tile.shape for tile in flat):
        places = [place for place, tile in enumerate(flat) if tile.shape == shape]
        if len(places) == 1:
            done[places[0]] = function(flat[places[0]])
            continue
        results = lax.map(function, jnp.stack([flat[place] for place in places]))
        done |= {place: results[index] for index, place in enumerate(places)}
    ordered = iter([done[place] for place in range(len(flat))])
    return [[next(ordered) for _ in row] for row in grid]

"""Recognises colour, shape, motion and background in the frames of a synthetic clip.

frames -> background (the border) -> mask of other pixels -> connected components in space and time
-> for each: colour of its core, path and area over time, best fitting shape
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, UInt8
from scipy import ndimage

from maxdiffusion.training.data.synthetic import BACKGROUNDS, COLOURS, SHAPES, Rgb, Scene, outside

# Distances of colours, channels from 0 to 255; the nearest colour and background are 108 apart.
DIFFERS = 55.0
LEAST_PIXELS = 30  # of a part in a frame, on average; the smallest shape drawn has 110
STILL_PIXELS = 5.0  # of 64: the slowest motion goes 10.5 along each of two axes
SIZE_CHANGE = 1.3  # of the area over the clip: the least change drawn is 2.9
_OCTANTS = ("right", "down right", "down", "down left", "left", "up left", "up", "up right")

Clip = UInt8[np.ndarray, "F Y X 3"]
Alpha = Float[np.ndarray, "F Y X"]


@dataclass(frozen=True, kw_only=True)
class SeenObject:
    """One recognised shape."""

    colour: str
    shape: str
    motion: str


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A recognised clip: its background, and its shapes from left to right."""

    background: str
    objects: tuple[SeenObject, ...]


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Properties of a scene that were recognised; with two shapes, both must be right."""

    colour: bool
    shape: bool
    motion: bool
    background: bool

    @property
    def all_right(self) -> bool:
        """True if every property is right."""
        return self.colour and self.shape and self.motion and self.background


def score(frames: Clip, wanted: Scene) -> Marks:
    """Compares a clip with the scene that it should show."""
    return compare(read_clip(frames), wanted)


def compare(seen: Seen, wanted: Scene) -> Marks:
    """Compares a recognised clip with the wanted scene."""
    objects = sorted(wanted.objects, key=lambda moving: moving.column)
    same_count = len(seen.objects) == len(objects)
    pairs = list(zip(seen.objects, objects, strict=False)) if same_count else []
    return Marks(
        colour=same_count and all(found.colour == right.colour for found, right in pairs),
        shape=same_count and all(found.shape == right.shape for found, right in pairs),
        motion=same_count and all(found.motion == right.motion for found, right in pairs),
        background=seen.background == wanted.background,
    )


def read_clip(frames: Clip) -> Seen:
    """Returns the background and the shapes of a clip."""
    pixels = frames.astype(np.float32)
    border = np.concatenate([pixels[:, :2].reshape(-1, 3), pixels[:, -2:].reshape(-1, 3)])
    backdrop = np.median(border, axis=0)
    differs = np.linalg.norm(pixels - backdrop, axis=-1)
    parts = [_read_object(pixels, backdrop, part, differs) for part in _parts(differs > DIFFERS)]
    return Seen(background=nearest(backdrop, BACKGROUNDS), objects=tuple(parts))


def nearest(colour: Float[np.ndarray, " 3"], known: Mapping[str, Rgb]) -> str:
    """Returns the name of the nearest known colour."""
    return min(known, key=lambda name: float(np.linalg.norm(colour - np.asarray(known[name]))))


def _parts(mask: Bool[np.ndarray, "F Y X"]) -> list[Bool[np.ndarray, "F Y X"]]:
    """Returns the large connected components in space and time, from left to right."""
    labels, count = ndimage.label(mask)
    regions = [labels == number for number in range(1, count + 1)]
    large = [region for region in regions if region.sum() >= LEAST_PIXELS * len(mask)]
    return sorted(large, key=lambda region: float(np.nonzero(region)[2].mean()))


def _read_object(
    pixels: Float[np.ndarray, "F Y X 3"],
    backdrop: Float[np.ndarray, " 3"],
    part: Bool[np.ndarray, "F Y X"],
    differs: Float[np.ndarray, "F Y X"],
) -> SeenObject:
    core = part & (differs >= np.median(differs[part]))
    colour = np.median(pixels[core], axis=0)
    # The threshold cut off the soft edge: add it again.
    around = ndimage.binary_dilation(part, np.ones((1, 3, 3)), iterations=2)
    ray = colour - backdrop
    share = (pixels - backdrop) @ ray / float(ray @ ray)
    alpha = np.clip(share, 0, 1) * around
    return SeenObject(
        colour=nearest(colour, COLOURS), shape=read_shape(alpha), motion=read_motion(alpha)
    )


def read_motion(alpha: Alpha) -> str:
    """Returns the motion of a region: growth if its area changes, else that of its centre."""
    areas, rows, columns = _moments(alpha)
    time = np.linspace(-0.5, 0.5, len(alpha))
    if len(alpha) == 1:
        return "stay"
    growth = np.polyfit(time, np.log(np.maximum(areas, 1.0)), 1)[0]
    if abs(growth) > 2 * math.log(SIZE_CHANGE):
        return "grow" if growth > 0 else "shrink"
    down, right = (np.polyfit(time, path, 1)[0] for path in (rows, columns))
    if math.hypot(down, right) < STILL_PIXELS * alpha.shape[1] / 64:
        return "stay"
    return _OCTANTS[round(math.atan2(down, right) / (math.pi / 4)) % 8]


def read_shape(alpha: Alpha) -> str:
    """Returns the shape that, with the same area and centre, overlaps the region best."""
    return max(SHAPES, key=lambda shape: _overlap(alpha, shape))


def _overlap(alpha: Alpha, shape: str) -> float:
    """Returns intersection over union of region and shape, over all frames, at the best size."""
    areas, rows, columns = _moments(alpha)
    at = np.arange(alpha.shape[1], dtype=np.float32)
    down = at[None, :, None] - rows[:, None, None]
    right = at[None, None, :] - columns[:, None, None]
    radii = np.sqrt(np.maximum(areas, 1.0) / math.pi)[:, None, None]
    best = 0.0
    for scale in (0.92, 1.0, 1.08):
        ideal = np.clip(0.5 - outside(shape, down, right, scale * radii), 0, 1)
        union = np.maximum(alpha, ideal).sum()
        best = max(best, float(np.minimum(alpha, ideal).sum() / max(union, 1e-6)))
    return best


def _moments(alpha: Alpha) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns area, centre row and centre column of every frame."""
    areas = alpha.sum(axis=(1, 2))
    safe = np.maximum(areas, 1e-6)
    rows = (alpha.sum(axis=2) * np.arange(alpha.shape[1])).sum(axis=1) / safe
    columns = (alpha.sum(axis=1) * np.arange(alpha.shape[2])).sum(axis=1) / safe
    return areas, rows, columns

"""Scenes drawn at random: the same seed and number give the same scene on every machine."""

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import numpy as np

from maxdiffusion.training.clips.scene import (
    BACKGROUNDS,
    COLOURS,
    HELD_OUT,
    MOTIONS,
    SHAPES,
    Combination,
    MovingShape,
    Scene,
)

Option = TypeVar("Option")
# Side by side there is room to go up and down, and to change size, but not to go sideways.
PAIR_MOTIONS = ("up", "down", "grow", "shrink", "stay")
_EVERY = tuple((c, s, m) for c in COLOURS for s in SHAPES for m in MOTIONS)


class Pool(Enum):
    """Which combinations of colour, shape and motion are drawn."""

    TRAINED = tuple(one for one in _EVERY if one not in HELD_OUT)
    HELD_OUT = tuple(one for one in _EVERY if one in HELD_OUT)
    ALL = _EVERY


@dataclass(frozen=True, kw_only=True)
class ClipFormat:
    """The size of clips, and how many of them show two shapes."""

    frames: int = 9
    size: int = 64
    pair_share: float = 0.0

    def __post_init__(self) -> None:
        if self.frames < 1 or (self.frames - 1) % 4:
            raise ValueError(f"frames={self.frames}: must be 4n + 1, such as 9 or 17")
        if self.size < 32 or self.size % 16:
            raise ValueError(f"size={self.size}: must be a multiple of 16 from 32")
        if not 0 <= self.pair_share <= 1:
            raise ValueError(f"pair_share={self.pair_share}: must lie between 0 and 1")


def draw_scene(clip: ClipFormat, pool: Pool, *, seed: int, index: int) -> Scene:
    """The scene with the number `index` of the stream `seed`."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, index, 1))))
    background = _choose(rng, tuple(BACKGROUNDS))
    if rng.random() < clip.pair_share:
        return Scene(background=background, objects=_pair(rng, pool, clip.size))
    return Scene(background=background, objects=(_single(rng, pool, clip.size),))


def _choose(rng: np.random.Generator, options: tuple[Option, ...]) -> Option:
    return options[int(rng.integers(len(options)))]


def _single(rng: np.random.Generator, pool: Pool, size: int) -> MovingShape:
    unit = size / 64
    colour, shape, motion = _combination(rng, pool, tuple(MOTIONS))
    middle, jitter = (size - 1) / 2, 3 * unit
    return MovingShape(
        shape=shape,
        colour=colour,
        motion=motion,
        row=middle + jitter * rng.uniform(-1, 1),
        column=middle + jitter * rng.uniform(-1, 1),
        radius=unit * rng.uniform(9.5, 12),
        travel=_travel(rng, motion, unit * rng.uniform(14, 20)),
    )


def _pair(rng: np.random.Generator, pool: Pool, size: int) -> tuple[MovingShape, ...]:
    """Two shapes in the left and in the right half."""
    unit = size / 64
    objects = []
    for side in (0.25, 0.75):
        colour, shape, motion = _combination(rng, pool, PAIR_MOTIONS)
        objects.append(
            MovingShape(
                shape=shape,
                colour=colour,
                motion=motion,
                row=(size - 1) / 2 + 3 * unit * rng.uniform(-1, 1),
                column=side * (size - 1) + unit * rng.uniform(-1, 1),
                radius=unit * rng.uniform(6.0, 7.0),
                travel=_travel(rng, motion, unit * rng.uniform(14, 20)),
            )
        )
    return tuple(objects)


def _combination(rng: np.random.Generator, pool: Pool, motions: tuple[str, ...]) -> Combination:
    """A combination whose motion is drawn first, so that every motion is as frequent."""
    possible = [one for one in pool.value if one[2] in motions]
    motion = _choose(rng, tuple(dict.fromkeys(one[2] for one in possible)))
    return _choose(rng, tuple(one for one in possible if one[2] == motion))


def _travel(rng: np.random.Generator, motion: str, pixels: float) -> float:
    if MOTIONS[motion] is None:
        return float(rng.uniform(1.7, 2.0))
    diagonal = " " in motion
    return float(pixels * (0.75 if diagonal else 1.0))

"""Synthetic clips: one or two plain shapes that move over a plain background, with captions.

draw_scene   a random scene; the same seed and number give the same scene on every machine
caption      a sentence for a scene, from a small grammar with several wordings
scene_of     the scene of such a sentence
render       the frames of a scene, with antialiased edges
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import product
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from jaxtyping import Float, UInt8

Rgb = tuple[int, int, int]

COLOURS: Mapping[str, Rgb] = MappingProxyType(
    {
        "red": (225, 35, 35),
        "green": (40, 180, 60),
        "blue": (45, 95, 245),
        "yellow": (245, 225, 50),
        "purple": (155, 50, 205),
        "orange": (250, 135, 25),
    }
)
BACKGROUNDS: Mapping[str, Rgb] = MappingProxyType(
    {
        "black": (12, 12, 14),
        "white": (242, 242, 240),
        "gray": (128, 128, 128),
        "navy": (20, 30, 90),
    }
)
SHAPES = ("circle", "square", "triangle")
# Direction of a motion in (rows down, columns right); None: the size changes instead.
MOTIONS: Mapping[str, tuple[int, int] | None] = MappingProxyType(
    {
        "left": (0, -1),
        "right": (0, 1),
        "up": (-1, 0),
        "down": (1, 0),
        "up left": (-1, -1),
        "up right": (-1, 1),
        "down left": (1, -1),
        "down right": (1, 1),
        "grow": None,
        "shrink": None,
        "stay": (0, 0),
    }
)
Combination = tuple[str, str, str]  # colour, shape, motion


def _held_out() -> frozenset[Combination]:
    """Returns one combination in nine; every colour, shape, motion and pair stays in training."""
    found = [
        (colour, shape, motion)
        for (c, colour), (s, shape), (m, motion) in product(
            enumerate(COLOURS), enumerate(SHAPES), enumerate(MOTIONS)
        )
        if (2 * c + 3 * s + 5 * m) % 9 == 4
    ]
    return frozenset(found)


# Combinations that training never draws, so that a score on them shows composition.
HELD_OUT = _held_out()


@dataclass(frozen=True, kw_only=True)
class MovingShape:
    """One shape, with its position at the middle of the clip.

    `travel` is the distance over the clip, in pixels along each axis of its direction, or the
    factor of its size for the motions `grow` and `shrink`.
    """

    shape: str
    colour: str
    motion: str
    row: float
    column: float
    radius: float  # of the circle with the same area
    travel: float

    def __post_init__(self) -> None:
        for name, value, known in (
            ("shape", self.shape, SHAPES),
            ("colour", self.colour, COLOURS),
            ("motion", self.motion, MOTIONS),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(known)}")
        if not self.radius > 0 or not self.travel >= 0:
            raise ValueError(f"radius={self.radius}, travel={self.travel}: must be positive")

    @property
    def combination(self) -> Combination:
        """Colour, shape and motion."""
        return (self.colour, self.shape, self.motion)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A whole clip: its background and its one or two shapes."""

    background: str
    objects: tuple[MovingShape, ...]

    def __post_init__(self) -> None:
        if self.background not in BACKGROUNDS:
            known = ", ".join(BACKGROUNDS)
            raise ValueError(f"background={self.background!r}: must be one of {known}")
        if len(self.objects) not in (1, 2):
            raise ValueError(f"objects={len(self.objects)}: a scene has one or two")


Option = TypeVar("Option")
NOUNS: Mapping[str, tuple[str, ...]] = {
    "circle": ("circle", "circle", "disc", "ball"),
    "square": ("square", "square", "box"),
    "triangle": ("triangle",),
}
# (finite form, participle) of every motion.
VERBS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "grow": (("grows", "growing"), ("gets bigger", "getting bigger"), ("expands", "expanding")),
    "shrink": (
        ("shrinks", "shrinking"),
        ("gets smaller", "getting smaller"),
        ("contracts", "contracting"),
    ),
    "stay": (
        ("stays still", "staying still"),
        ("does not move", "not moving"),
        ("rests", "resting"),
    ),
}
GOING = (("moves", "moving"), ("moves", "moving"), ("slides", "sliding"), ("drifts", "drifting"))
DIRECTIONS: Mapping[str, tuple[str, ...]] = {
    "left": ("left", "to the left"),
    "right": ("right", "to the right"),
    "up": ("up", "upwards", "to the top"),
    "down": ("down", "downwards", "to the bottom"),
    "up left": ("up and left", "diagonally up and to the left", "to the top left"),
    "up right": ("up and right", "diagonally up and to the right", "to the top right"),
    "down left": ("down and left", "diagonally down and to the left", "to the bottom left"),
    "down right": ("down and right", "diagonally down and to the right", "to the bottom right"),
}
BACKDROPS: Mapping[str, tuple[str, ...]] = {
    name: (name, "grey") if name == "gray" else (name,) for name in BACKGROUNDS
}
# {finite}: "a red circle moves left"; {moving}: "a red circle moving left".
SENTENCES = (
    "{finite} on a {backdrop} background",
    "{finite} on a {backdrop} background",
    "{finite} over a {backdrop} background",
    "on a {backdrop} background, {finite}",
    "{moving} on a {backdrop} background",
    "a video of {moving}, {backdrop} background",
    "{finite}. the background is {backdrop}",
)


def caption(scene: Scene, *, seed: int, index: int) -> str:
    """Returns a sentence for a scene; the same seed and number give the same one."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, index, 2))))
    parts = [_phrases(rng, moving) for moving in scene.objects]
    return _choose(rng, SENTENCES).format(
        finite=" and ".join(finite for finite, _ in parts),
        moving=" and ".join(moving for _, moving in parts),
        backdrop=_choose(rng, BACKDROPS[scene.background]),
    )


def scene_of(text: str) -> Scene | None:
    """Returns the scene that a caption of one shape describes; None for any other text.

    The shape is in the middle, of a usual size and travel: captions do not say them.
    """
    for sentence in dict.fromkeys(SENTENCES):
        moving = "{moving}" in sentence
        found = re.fullmatch(_pattern(sentence, moving), text.strip().lower().rstrip("."))
        if found is None:
            continue
        motions = _motion_phrases(moving)
        return Scene(
            background=_name_of(found["backdrop"], BACKDROPS),
            objects=(
                MovingShape(
                    shape=_name_of(found["noun"], NOUNS),
                    colour=found["colour"],
                    motion=motions[found["motion"]],
                    row=31.5,
                    column=31.5,
                    radius=11.0,
                    travel=1.8 if motions[found["motion"]] in VERBS else 16.0,
                ),
            ),
        )
    return None


def _pattern(sentence: str, moving: bool) -> str:
    """Returns the expression of a sentence; longer phrases come before their beginnings."""
    nouns = {noun for row in NOUNS.values() for noun in row}
    backdrops = {backdrop for row in BACKDROPS.values() for backdrop in row}
    thing = f"an? (?P<colour>{_any(COLOURS)}) (?P<noun>{_any(nouns)})"
    phrase = f"{thing} (?P<motion>{_any(_motion_phrases(moving))})"
    return sentence.replace(".", r"\.").format(
        finite=phrase, moving=phrase, backdrop=f"(?P<backdrop>{_any(backdrops)})"
    )


def _any(phrases: Iterable[str]) -> str:
    return "|".join(sorted(phrases, key=len, reverse=True))


def _motion_phrases(moving: bool) -> dict[str, str]:
    """Returns the motion of every phrase, of participles or of finite forms."""
    form = 1 if moving else 0
    phrases = {pair[form]: motion for motion, pairs in VERBS.items() for pair in pairs}
    return phrases | {
        f"{pair[form]} {where}": motion
        for motion, directions in DIRECTIONS.items()
        for where in directions
        for pair in GOING
    }


def _name_of(phrase: str, table: Mapping[str, tuple[str, ...]]) -> str:
    return next(name for name, phrases in table.items() if phrase in phrases)


def every_word() -> tuple[str, ...]:
    """Returns every word that a caption may contain, in a fixed order."""
    phrases = [sentence.format(finite="", moving="", backdrop="") for sentence in SENTENCES]
    phrases += ["and an", *COLOURS, *(form for pair in GOING for form in pair)]
    for table in (NOUNS, DIRECTIONS, BACKDROPS):
        phrases += [phrase for row in table.values() for phrase in row]
    phrases += [form for row in VERBS.values() for pair in row for form in pair]
    words = " ".join(phrases).replace(",", " ").replace(".", " ").split()
    return tuple(dict.fromkeys(words))


def _phrases(rng: np.random.Generator, moving: MovingShape) -> tuple[str, str]:
    """Returns the shape and its motion, as a sentence and as a noun phrase."""
    article = "an" if moving.colour[0] in "aeiou" else "a"
    thing = f"{article} {moving.colour} {_choose(rng, NOUNS[moving.shape])}"
    if moving.motion in VERBS:
        verbs, where = _choose(rng, VERBS[moving.motion]), ""
    else:
        verbs, where = _choose(rng, GOING), f" {_choose(rng, DIRECTIONS[moving.motion])}"
    return f"{thing} {verbs[0]}{where}", f"{thing} {verbs[1]}{where}"


def _choose(rng: np.random.Generator, options: tuple[Option, ...]) -> Option:
    return options[int(rng.integers(len(options)))]


# Two shapes have room to move up and down and to change size, but not to move sideways.
PAIR_MOTIONS = ("up", "down", "grow", "shrink", "stay")
_EVERY = tuple((c, s, m) for c in COLOURS for s in SHAPES for m in MOTIONS)


class Pool(Enum):
    """Sets of combinations of colour, shape and motion to draw from."""

    TRAINED = tuple(one for one in _EVERY if one not in HELD_OUT)
    HELD_OUT = tuple(one for one in _EVERY if one in HELD_OUT)
    ALL = _EVERY


@dataclass(frozen=True, kw_only=True)
class ClipFormat:
    """The size of clips, and the share of clips with two shapes."""

    frames: int = 9
    size: int = 64
    pair_share: float = 0.0

    def __post_init__(self) -> None:
        if self.frames < 1 or (self.frames - 1) % 4:
            raise ValueError(f"frames={self.frames}: must be 4n + 1, such as 9 or 17")
        if self.size < 32 or self.size % 16:
            raise ValueError(f"size={self.size}: must be a multiple of 16 from 32")
        if not 0 <= self.pair_share <= 1:
            raise ValueError(f"pair_share={self.pair_share}: must be between 0 and 1")


def draw_scene(clip: ClipFormat, pool: Pool, *, seed: int, index: int) -> Scene:
    """Returns scene number `index` of the stream `seed`."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, index, 1))))
    background = _choose(rng, tuple(BACKGROUNDS))
    if rng.random() < clip.pair_share:
        return Scene(background=background, objects=_pair(rng, pool, clip.size))
    return Scene(background=background, objects=(_single(rng, pool, clip.size),))


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
    """Returns one shape in the left half and one in the right half."""
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
    """Returns a combination; draws the motion first, so that motions are equally frequent."""
    possible = [one for one in pool.value if one[2] in motions]
    motion = _choose(rng, tuple(dict.fromkeys(one[2] for one in possible)))
    return _choose(rng, tuple(one for one in possible if one[2] == motion))


def _travel(rng: np.random.Generator, motion: str, pixels: float) -> float:
    if MOTIONS[motion] is None:
        return float(rng.uniform(1.7, 2.0))
    diagonal = " " in motion
    return float(pixels * (0.75 if diagonal else 1.0))


# Half side and circumradius that give a shape the area of a circle of radius 1.
_SQUARE_HALF = math.sqrt(math.pi) / 2
_TRIANGLE_INRADIUS = math.sqrt(math.pi / (3 * math.sqrt(3)))
Distances = Float[np.ndarray, "F Y X"]


def render(scene: Scene, *, frames: int, size: int) -> UInt8[np.ndarray, "F Y X 3"]:
    """Returns the frames of a scene as bytes."""
    picture = np.empty((frames, size, size, 3), np.float32)
    picture[:] = BACKGROUNDS[scene.background]
    for moving in scene.objects:
        covered = coverage(moving, frames=frames, size=size)[..., None]
        picture += covered * (np.asarray(COLOURS[moving.colour], np.float32) - picture)
    return np.rint(picture).astype(np.uint8)


def coverage(moving: MovingShape, *, frames: int, size: int) -> Distances:
    """Returns the covered share of every pixel, from 0 to 1."""
    rows, columns, radii = trajectory(moving, frames)
    at = np.arange(size, dtype=np.float32)
    down = at[None, :, None] - rows[:, None, None]
    right = at[None, None, :] - columns[:, None, None]
    return np.clip(0.5 - outside(moving.shape, down, right, radii[:, None, None]), 0, 1)


def trajectory(
    moving: MovingShape, frames: int
) -> tuple[Float[np.ndarray, " F"], Float[np.ndarray, " F"], Float[np.ndarray, " F"]]:
    """Returns row, column and radius of the shape in every frame."""
    time = np.linspace(-0.5, 0.5, frames, dtype=np.float32)
    direction = MOTIONS[moving.motion]
    if direction is None:
        factor = moving.travel if moving.motion == "grow" else 1 / moving.travel
        still = np.zeros_like(time)
        return moving.row + still, moving.column + still, moving.radius * factor**time
    path = moving.travel * time
    radius = np.full_like(time, moving.radius)
    return moving.row + direction[0] * path, moving.column + direction[1] * path, radius


def outside(shape: str, down: np.ndarray, right: np.ndarray, radius: np.ndarray) -> Distances:
    """Returns distances from the edge of a shape (negative inside); shapes have equal area."""
    if shape == "circle":
        return np.hypot(down, right) - radius
    if shape == "square":
        return np.maximum(np.abs(down), np.abs(right)) - _SQUARE_HALF * radius
    sides = np.maximum(down, math.sqrt(0.75) * np.abs(right) - 0.5 * down)
    return sides - _TRIANGLE_INRADIUS * radius

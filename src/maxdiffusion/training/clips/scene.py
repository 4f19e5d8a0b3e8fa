"""What a clip shows: one or two plain shapes that move over a plain background."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

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
# Direction of a motion in pixels of (rows down, columns right); None: it changes size instead.
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
    """One combination in nine, spread so that every colour, shape, motion and pair is trained."""
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
    """One shape: what it is, and where it is at the middle of the clip.

    `travel` is how far it goes over the clip, in pixels along each axis of its direction, or by
    what factor its size changes for the motions `grow` and `shrink`.
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
        """What the shape is called: colour, shape, motion."""
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

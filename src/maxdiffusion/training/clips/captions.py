"""Sentences for scenes: a small grammar with several ways to say the same."""

from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from maxdiffusion.training.clips.scene import BACKGROUNDS, COLOURS, MovingShape, Scene

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
    """One of the sentences for a scene; the same seed and number give the same one."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, index, 2))))
    parts = [_phrases(rng, moving) for moving in scene.objects]
    return _choose(rng, SENTENCES).format(
        finite=" and ".join(finite for finite, _ in parts),
        moving=" and ".join(moving for _, moving in parts),
        backdrop=_choose(rng, BACKDROPS[scene.background]),
    )


def every_word() -> tuple[str, ...]:
    """Every word that a caption may hold, in a fixed order."""
    phrases = [sentence.format(finite="", moving="", backdrop="") for sentence in SENTENCES]
    phrases += ["and an", *COLOURS, *(form for pair in GOING for form in pair)]
    for table in (NOUNS, DIRECTIONS, BACKDROPS):
        phrases += [phrase for row in table.values() for phrase in row]
    phrases += [form for row in VERBS.values() for pair in row for form in pair]
    words = " ".join(phrases).replace(",", " ").replace(".", " ").split()
    return tuple(dict.fromkeys(words))


def _phrases(rng: np.random.Generator, moving: MovingShape) -> tuple[str, str]:
    """The shape and what it does, as a sentence and as a thing."""
    article = "an" if moving.colour[0] in "aeiou" else "a"
    thing = f"{article} {moving.colour} {_choose(rng, NOUNS[moving.shape])}"
    if moving.motion in VERBS:
        verbs, where = _choose(rng, VERBS[moving.motion]), ""
    else:
        verbs, where = _choose(rng, GOING), f" {_choose(rng, DIRECTIONS[moving.motion])}"
    return f"{thing} {verbs[0]}{where}", f"{thing} {verbs[1]}{where}"


def _choose(rng: np.random.Generator, options: tuple[Option, ...]) -> Option:
    return options[int(rng.integers(len(options)))]

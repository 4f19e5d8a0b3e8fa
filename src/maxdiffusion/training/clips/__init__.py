"""Captioned clips of plain moving shapes, made on the spot from a seed and a number."""

from maxdiffusion.training.clips.captions import caption, every_word
from maxdiffusion.training.clips.drawing import ClipFormat, Pool, draw_scene
from maxdiffusion.training.clips.rendering import render
from maxdiffusion.training.clips.scene import (
    BACKGROUNDS,
    COLOURS,
    HELD_OUT,
    MOTIONS,
    SHAPES,
    MovingShape,
    Scene,
)

__all__ = [
    "BACKGROUNDS",
    "COLOURS",
    "HELD_OUT",
    "MOTIONS",
    "SHAPES",
    "ClipFormat",
    "MovingShape",
    "Pool",
    "Scene",
    "caption",
    "draw_scene",
    "every_word",
    "render",
]

"""Frames of a scene, with edges that are smooth to a fraction of a pixel."""

import math

import numpy as np
from jaxtyping import Float, UInt8

from maxdiffusion.training.clips.scene import BACKGROUNDS, COLOURS, MOTIONS, MovingShape, Scene

# Half side and circumradius that give a shape the area of a circle of radius 1.
_SQUARE_HALF = math.sqrt(math.pi) / 2
_TRIANGLE_INRADIUS = math.sqrt(math.pi / (3 * math.sqrt(3)))
Distances = Float[np.ndarray, "F Y X"]


def render(scene: Scene, *, frames: int, size: int) -> UInt8[np.ndarray, "F Y X 3"]:
    """The clip of a scene as bytes."""
    picture = np.empty((frames, size, size, 3), np.float32)
    picture[:] = BACKGROUNDS[scene.background]
    for moving in scene.objects:
        covered = coverage(moving, frames=frames, size=size)[..., None]
        picture += covered * (np.asarray(COLOURS[moving.colour], np.float32) - picture)
    return np.rint(picture).astype(np.uint8)


def coverage(moving: MovingShape, *, frames: int, size: int) -> Distances:
    """How much of every pixel the shape covers, from 0 to 1."""
    rows, columns, radii = trajectory(moving, frames)
    at = np.arange(size, dtype=np.float32)
    down = at[None, :, None] - rows[:, None, None]
    right = at[None, None, :] - columns[:, None, None]
    return np.clip(0.5 - outside(moving.shape, down, right, radii[:, None, None]), 0, 1)


def trajectory(
    moving: MovingShape, frames: int
) -> tuple[Float[np.ndarray, " F"], Float[np.ndarray, " F"], Float[np.ndarray, " F"]]:
    """Row, column and radius of the shape in every frame."""
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
    """Pixels from the edge of a shape (negative inside), all shapes of the same area."""
    if shape == "circle":
        return np.hypot(down, right) - radius
    if shape == "square":
        return np.maximum(np.abs(down), np.abs(right)) - _SQUARE_HALF * radius
    sides = np.maximum(down, math.sqrt(0.75) * np.abs(right) - 0.5 * down)
    return sides - _TRIANGLE_INRADIUS * radius

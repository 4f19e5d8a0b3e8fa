"""Previews of unfinished videos: a linear map from latents to colours, fitted to the VAE in use.

    latents [C] of one position --> [1, C] @ [C + 1, 3] --> red, green, blue of its 8 x 8 pixels

The map is the least-squares solution over positions whose colours are known. At the start it is
fitted to decoded noise, and then to every video that the server decodes, which weighs more as
videos come. It costs one small matrix product per step.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from maxdiffusion.runtime.files import replacing

FORGET = 0.7  # weight of earlier videos when a new one is added
RIDGE = 1e-3
MOST_FRAMES = 12
FRAME_MILLISECONDS = 160
LARGEST_SIDE = 320


class PreviewMap:
    """Normal equations of the fit; `add` takes positions with known colours."""

    def __init__(self, channels: int):
        self.channels = channels
        self._products = np.zeros((channels + 1, channels + 1))
        self._targets = np.zeros((channels + 1, 3))
        self._weights: np.ndarray | None = None

    def add(
        self, latents: Float[np.ndarray, "F Y X C"], frames: UInt8[np.ndarray, "f y x 3"]
    ) -> None:
        """Adds a decoded video to the fit."""
        inputs = _with_one(latents)
        colours = pooled(frames, latents.shape[:3]).reshape(-1, 3)
        count = len(inputs)
        self._products = FORGET * self._products + inputs.T @ inputs / count
        self._targets = FORGET * self._targets + inputs.T @ colours / count
        self._weights = None

    @property
    def weights(self) -> np.ndarray:
        """The map, [C + 1, 3]."""
        if self._weights is None:
            ridge = RIDGE * np.eye(self.channels + 1)
            self._weights = np.linalg.solve(self._products + ridge, self._targets)
        return self._weights

    def colours(self, latents: Float[np.ndarray, "F Y X C"]) -> UInt8[np.ndarray, "F Y X 3"]:
        """Returns the colours of every position."""
        values = _with_one(latents) @ self.weights
        shaped = values.reshape(*latents.shape[:3], 3)
        return (np.clip(shaped, 0, 1) * 255).astype(np.uint8)

    def save(self, path: Path) -> None:
        """Stores the fit, so that the next start has it."""
        content = {"products": self._products.tolist(), "targets": self._targets.tolist()}
        with replacing(path) as unfinished:
            unfinished.write_text(json.dumps(content))

    @classmethod
    def load(cls, path: Path, channels: int) -> "PreviewMap | None":
        """Returns a stored fit; None if there is none for this number of channels."""
        try:
            content = json.loads(path.read_text())
            products, targets = np.array(content["products"]), np.array(content["targets"])
        except (OSError, ValueError, KeyError):
            return None
        if products.shape != (channels + 1, channels + 1) or targets.shape != (channels + 1, 3):
            return None
        loaded = cls(channels)
        loaded._products, loaded._targets = products, targets
        return loaded


def _with_one(latents: Float[np.ndarray, "F Y X C"]) -> np.ndarray:
    flat = latents.reshape(-1, latents.shape[-1]).astype(np.float64)
    return np.concatenate([flat, np.ones((len(flat), 1))], axis=1)


def pooled(
    frames: UInt8[np.ndarray, "f y x 3"], size: Sequence[int]
) -> Float[np.ndarray, "F Y X 3"]:
    """Returns the mean colour, 0 to 1, of the pixels that each latent position stands for.

    The first latent frame is the first frame; every other one stands for the same number of frames.
    """
    count, rows, columns = size
    height, width = frames.shape[1] // rows, frames.shape[2] // columns
    tiles = frames.astype(np.float32).reshape(len(frames), rows, height, columns, width, 3)
    colours = tiles.mean(axis=(2, 4)) / 255
    if count == 1:
        return colours[:1]
    later = colours[1:].reshape(count - 1, -1, rows, columns, 3).mean(axis=1)
    return np.concatenate([colours[:1], later])


def clean_estimate(
    latents: np.ndarray, before: np.ndarray, noise: float, noise_before: float
) -> np.ndarray:
    """Returns an estimate of the finished latents from two steps.

    In flow matching x = (1 - s) clean + s noise, so the change of x with s is noise - clean; the
    straight line through two steps, continued to s = 0, is the clean video if the velocity is
    constant.
    """
    if noise == noise_before:
        return latents
    return latents - noise * (latents - before) / (noise - noise_before)


def animated(colours: UInt8[np.ndarray, "F Y X 3"], size: tuple[int, int]) -> bytes:
    """Returns an animated WebP of up to 12 frames; `size` is the width and height of the video."""
    count = min(MOST_FRAMES, len(colours))
    chosen = np.linspace(0, len(colours) - 1, count).round().astype(int)
    scale = min(1.0, LARGEST_SIDE / max(size))
    target = (max(1, round(size[0] * scale)), max(1, round(size[1] * scale)))
    images = [Image.fromarray(colours[i]).resize(target, Image.Resampling.BICUBIC) for i in chosen]
    buffer = io.BytesIO()
    images[0].save(
        buffer,
        format="WEBP",
        save_all=True,
        append_images=images[1:],
        duration=FRAME_MILLISECONDS,
        loop=0,
        quality=70,
        method=0,
    )
    return buffer.getvalue()

"""Clips that are made on the spot, with their captions."""

from dataclasses import dataclass

import numpy as np

from maxdiffusion.training.clips import ClipFormat, Pool, Scene, caption, draw_scene, render
from maxdiffusion.training.data import Sample


@dataclass(frozen=True, kw_only=True)
class SyntheticClips:
    """The first `count` clips of a stream of moving shapes.

    With a `window` only that many pixels square around a shape are shown: most of a clip is plain
    background, which an autoencoder learns at once.
    """

    clip: ClipFormat
    count: int
    seed: int = 0
    pool: Pool = Pool.TRAINED
    window: int | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count={self.count}: must be at least 1")
        size = self.clip.size
        if self.window is not None and (not 16 <= self.window <= size or self.window % 16):
            raise ValueError(f"window={self.window}: must be a multiple of 16 up to {size}")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        """The frames of a clip, as bytes."""
        clip, scene = self.clip, self.scene(index)
        video = render(scene, frames=clip.frames, size=clip.size)
        return {"video": video if self.window is None else self._cut(video, scene, index)}

    def _cut(self, video: np.ndarray, scene: Scene, index: int) -> np.ndarray:
        """The window near one of the shapes."""
        assert self.window is not None
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, index, 3))))
        shape = scene.objects[int(rng.integers(len(scene.objects)))]
        middle = np.array([shape.row, shape.column]) + rng.uniform(-0.3, 0.3, 2) * self.window
        corner = np.rint(middle - self.window / 2).astype(int)
        row, column = np.clip(corner, 0, self.clip.size - self.window)
        return video[:, row : row + self.window, column : column + self.window]

    def scene(self, index: int) -> Scene:
        """What a clip shows."""
        return draw_scene(self.clip, self.pool, seed=self.seed, index=index)

    def caption(self, index: int) -> str:
        """What is said of a clip."""
        return caption(self.scene(index), seed=self.seed, index=index)

    def describe(self) -> dict[str, object]:
        """What the clips depend on, as plain values."""
        clip = self.clip
        return {
            "source": "synthetic",
            "count": self.count,
            "seed": self.seed,
            "pool": self.pool.name,
            "frames": clip.frames,
            "size": clip.size,
            "pair_share": clip.pair_share,
            "window": self.window,
        }


def as_signed(video: np.ndarray) -> np.ndarray:
    """Bytes as numbers from -1 to 1."""
    return video.astype(np.float32) / 127.5 - 1.0

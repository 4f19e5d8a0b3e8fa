"""Clips that are made on the spot, with their captions."""

from dataclasses import dataclass

import numpy as np

from maxdiffusion.training.clips import ClipFormat, Pool, Scene, caption, draw_scene, render
from maxdiffusion.training.data import Sample


@dataclass(frozen=True, kw_only=True)
class SyntheticClips:
    """The first `count` clips of a stream of moving shapes."""

    clip: ClipFormat
    count: int
    seed: int = 0
    pool: Pool = Pool.TRAINED

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count={self.count}: must be at least 1")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        """The frames of a clip, as bytes."""
        clip = self.clip
        return {"video": render(self.scene(index), frames=clip.frames, size=clip.size)}

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
        }


def as_signed(video: np.ndarray) -> np.ndarray:
    """Bytes as numbers from -1 to 1."""
    return video.astype(np.float32) / 127.5 - 1.0

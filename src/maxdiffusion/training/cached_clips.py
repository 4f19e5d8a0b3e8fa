"""The samples of a filled cache, read row by row from its shards."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from maxdiffusion.runtime.json_lines import whole_lines
from maxdiffusion.runtime.places import local_copy
from maxdiffusion.runtime.problems import ProblemsFound
from maxdiffusion.training.data import Sample
from maxdiffusion.training.latent_cache import MANIFEST, SKIPPED, bad_cache


class CachedClips:
    """Latents, tokens and the number of tokens of clips."""

    def __init__(self, folder: Path):
        self._folder = folder
        if not (folder / MANIFEST).is_file() or not self.files:
            raise ProblemsFound([bad_cache(folder, "holds no cached latents")])
        if not len(self):
            count = len(whole_lines(folder / SKIPPED))
            rule = f"holds no clip: all {count} could not be used, as {SKIPPED} in it lists"
            raise ProblemsFound([bad_cache(folder, rule)])

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The shards, in their order."""
        return tuple(sorted(self._folder.glob("shard-*.safetensors")))

    @cached_property
    def shards(self) -> tuple["Shard", ...]:
        """The shards, opened."""
        return tuple(Shard(file) for file in self.files)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([shard.rows("lengths") for shard in self.shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def place(self, index: int) -> tuple[int, int]:
        """The shard that a clip is in, by its place in `shards`, and its row there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - (int(self._ends[number - 1]) if number else 0)

    def __getitem__(self, index: int) -> Sample:
        """Latents, tokens and the number of tokens of one clip."""
        number, row = self.place(index)
        return self.shards[number].read(row)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Frames, rows, columns and channels of every clip."""
        number, _ = self.place(0)
        return self.shards[number].shape("latents")[1:]

    @property
    def caption_tokens(self) -> int:
        """The length that captions are filled up to."""
        return self.shards[0].shape("ids")[1]


class Shard:
    """Tensors of as many rows each in one file; only the rows that are asked for are read."""

    def __init__(self, file: Path):
        self._opened: Any = safe_open(local_copy(file), framework="np")
        self._slices = {name: self._opened.get_slice(name) for name in self._opened.keys()}  # noqa: SIM118

    def read(self, row: int, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """One row of the tensors (None: of all)."""
        return {name: self._slices[name][row] for name in names or self._slices}

    def whole(self, name: str) -> np.ndarray:
        """A whole tensor."""
        return self._opened.get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._slices[name].get_shape())

    def rows(self, name: str) -> int:
        """How many rows there are."""
        return self.shape(name)[0]

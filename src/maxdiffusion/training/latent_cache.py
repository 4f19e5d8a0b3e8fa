"""Latents and captions of clips, encoded once and kept in safetensors shards.

    <folder>/manifest.json           what the shards were made from
    <folder>/shard-00000.safetensors latents [n F Y X C], ids [n T], lengths [n]
    <folder>/skipped.jsonl           clips that could not be used, and why

Shards are written one after the other, whole or not at all: a run that is cut short goes on with
the first that is missing.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from maxdiffusion.runtime.atomic import replacing
from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.training.data import Sample
from maxdiffusion.training.text import padded_ids
from maxdiffusion.training.video_folder import UnusableClip

MANIFEST, SKIPPED = "manifest.json", "skipped.jsonl"
Encode = Callable[[np.ndarray], np.ndarray]  # videos [B F Y X 3] as bytes -> normalised latents
Tokenize = Callable[[str], Sequence[int]]


class CaptionedClips(Protocol):
    """Clips by number, with captions, and what they depend on."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...
    def caption(self, index: int) -> str:
        """What is said of a clip."""

    def describe(self) -> dict[str, object]:
        """What the clips depend on, as plain values."""


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """How clips become shards; `model` names the autoencoder and the tokenizer (a hash)."""

    model: str
    caption_tokens: int
    shard: int = 512
    batch: int = 16

    def __post_init__(self) -> None:
        if self.shard < 1 or self.batch < 1 or self.caption_tokens < 1:
            raise ValueError(f"{self}: all sizes must be at least 1")


def fill_cache(
    folder: Path,
    clips: CaptionedClips,
    plan: CachePlan,
    *,
    encode: Encode,
    tokenize: Tokenize,
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Writes every shard that is missing; `advance` is called after each."""
    _agree(folder, _identity(clips, plan))
    for number in range(_count(len(clips), plan.shard)):
        file = _shard(folder, number)
        if not file.exists():
            indices = range(number * plan.shard, min(len(clips), (number + 1) * plan.shard))
            _write_shard(file, indices, clips, plan, encode, tokenize)
        advance()


def _write_shard(
    file: Path,
    indices: Sequence[int],
    clips: CaptionedClips,
    plan: CachePlan,
    encode: Encode,
    tokenize: Tokenize,
) -> None:
    videos, texts = [], []
    for index in indices:
        try:
            videos.append(clips[index]["video"])
        except UnusableClip as error:
            _note(file.parent / SKIPPED, {"clip": index, "reason": str(error)})
            continue
        texts.append(tuple(tokenize(clips.caption(index))))
    if not videos:
        return
    latents = [
        encode(np.stack(videos[at : at + plan.batch])) for at in range(0, len(videos), plan.batch)
    ]
    tensors = {
        "latents": np.concatenate(latents).astype(np.float32),
        "ids": padded_ids(texts, plan.caption_tokens),
        "lengths": np.asarray([len(text) for text in texts], np.int32),
    }
    with replacing(file) as unfinished:
        save_file(tensors, unfinished)


class CachedClips:
    """The samples of a filled cache, read row by row."""

    def __init__(self, folder: Path):
        self._folder = folder
        if not (folder / MANIFEST).is_file() or not self._files:
            raise ProblemsFound([_bad(folder, "holds no cached latents")])

    @cached_property
    def _files(self) -> tuple[Path, ...]:
        return tuple(sorted(self._folder.glob("shard-*.safetensors")))

    @cached_property
    def _shards(self) -> tuple[Mapping[str, np.ndarray], ...]:
        return tuple(_tensors(file) for file in self._files)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(shard["lengths"]) for shard in self._shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Sample:
        """Latents, tokens and the number of tokens of one clip."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        shard = self._shards[number]
        row = index - (int(self._ends[number - 1]) if number else 0)
        return {name: tensor[row] for name, tensor in shard.items()}

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Frames, rows, columns and channels of every clip."""
        return self._shards[0]["latents"].shape[1:]

    @property
    def caption_tokens(self) -> int:
        """The length that captions are filled up to."""
        return self._shards[0]["ids"].shape[1]


def _tensors(file: Path) -> dict[str, np.ndarray]:
    with safe_open(file, framework="np") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _identity(clips: CaptionedClips, plan: CachePlan) -> dict[str, Any]:
    text = json.dumps(clips.describe(), sort_keys=True)
    return {
        "clips": hashlib.sha256(text.encode()).hexdigest(),
        "count": len(clips),
        "model": plan.model,
        "caption_tokens": plan.caption_tokens,
        "shard": plan.shard,
    }


def _agree(folder: Path, identity: Mapping[str, Any]) -> None:
    """Notes what the shards are made from, or refuses to mix two kinds."""
    file = folder / MANIFEST
    if not file.exists():
        with replacing(file) as unfinished:
            unfinished.write_text(json.dumps(identity, indent=2) + "\n")
        return
    held = json.loads(file.read_text())
    other = sorted(key for key in identity if held.get(key) != identity[key])
    if other:
        raise ProblemsFound([_bad(folder, f"was made from another {' and '.join(other)}")])


def _count(clips: int, shard: int) -> int:
    return -(-clips // shard)


def _shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def _note(file: Path, line: Mapping[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def _bad(folder: Path, rule: str) -> Problem:
    remedy = "Name another folder, or remove this one"
    return Problem(name="latent cache", value=str(folder), rule=rule, remedy=remedy)

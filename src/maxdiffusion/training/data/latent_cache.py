"""Latents and captions of clips, encoded once and kept in safetensors shards.

    <folder>/manifest.json           what the shards were made from
    <folder>/shard-00000.safetensors latents [n F Y X C], ids [n T], lengths [n]
    <folder>/skipped.jsonl           clips that could not be used, and why

`text_cache.py` adds what a text encoder makes of the captions. Shards are written one after the
other, whole or not at all: a run that is cut short goes on with the first that is missing.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors.numpy import save_file

from maxdiffusion.runtime.atomic import replacing
from maxdiffusion.runtime.disk import writing
from maxdiffusion.runtime.json_lines import add_new_lines
from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.training.data import Sample
from maxdiffusion.training.text import padded_ids
from maxdiffusion.training.video_folder import UnusableClip

MANIFEST, SKIPPED = "manifest.json", "skipped.jsonl"
Encode = Callable[[np.ndarray], np.ndarray]  # videos [B F Y X 3] as bytes -> normalised latents
Tokenize = Callable[[str], Sequence[int]]
Advance = Callable[[], None]


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


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of the shards that one of `count` processes writes."""

    index: int = 0
    count: int = 1

    def of(self, shards: Sequence[Any]) -> Sequence[Any]:
        """Every `count`-th of them."""
        return shards[self.index :: self.count]


def shard_numbers(clips: int, shard: int) -> range:
    """The numbers of the shards that so many clips fill."""
    return range(-(-clips // shard))


def fill_cache(
    folder: Path,
    clips: CaptionedClips,
    plan: CachePlan,
    *,
    encode: Encode,
    tokenize: Tokenize,
    share: Share | None = None,
    advance: Advance = lambda: None,
) -> None:
    """Writes every shard of the share that is missing; `advance` is called after each."""
    agree(folder / MANIFEST, _identity(clips, plan))
    for number in (share or Share()).of(shard_numbers(len(clips), plan.shard)):
        file = shard_file(folder, number)
        if not file.exists():
            indices = range(number * plan.shard, min(len(clips), (number + 1) * plan.shard))
            tensors = _encoded(clips, indices, plan, encode, tokenize, skipped=folder / SKIPPED)
            save_shard(file, tensors)
        advance()


def _encoded(
    clips: CaptionedClips,
    indices: Sequence[int],
    plan: CachePlan,
    encode: Encode,
    tokenize: Tokenize,
    *,
    skipped: Path,
) -> dict[str, np.ndarray]:
    """The tensors of a shard; without latents if none of its clips can be used."""
    latents: list[np.ndarray] = []
    texts: list[tuple[int, ...]] = []
    bad: list[dict[str, Any]] = []
    for group in _groups(_usable(clips, indices, bad), plan.batch):
        latents.append(encode(np.stack([video for _, video in group])).astype(np.float32))
        texts += [tuple(tokenize(clips.caption(index))) for index, _ in group]
    add_new_lines(skipped, bad)
    held = {"latents": np.concatenate(latents)} if latents else {}
    return held | {
        "ids": padded_ids(texts, plan.caption_tokens),
        "lengths": np.asarray([len(text) for text in texts], np.int32),
    }


def _usable(
    clips: CaptionedClips, indices: Sequence[int], bad: list[dict[str, Any]]
) -> Iterator[tuple[int, np.ndarray]]:
    """Numbers and frames of the clips that can be used; the others are added to `bad`."""
    for index in indices:
        try:
            yield index, clips[index]["video"]
        except UnusableClip as error:
            bad.append({"clip": index, "reason": str(error)})


def _groups(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Items in lists of `size`, the last one maybe shorter; one list is held at a time."""
    group: list[Any] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def save_shard(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a shard whole or not at all."""
    with writing(f"the shard {file.name}", file.parent), replacing(file) as unfinished:
        save_file(dict(tensors), unfinished)


def shard_file(folder: Path, number: int, kind: str = "shard") -> Path:
    """Where a shard is kept."""
    return folder / f"{kind}-{number:05d}.safetensors"


def _identity(clips: CaptionedClips, plan: CachePlan) -> dict[str, Any]:
    text = json.dumps(clips.describe(), sort_keys=True)
    return {
        "clips": hashlib.sha256(text.encode()).hexdigest(),
        "count": len(clips),
        "model": plan.model,
        "caption_tokens": plan.caption_tokens,
        "shard": plan.shard,
    }


def agree(manifest: Path, identity: Mapping[str, Any]) -> None:
    """Notes what the shards are made from, or refuses to mix two kinds."""
    if not manifest.exists():
        with writing(manifest.name, manifest.parent), replacing(manifest) as unfinished:
            unfinished.write_text(json.dumps(identity, indent=2) + "\n")
        return
    held = json.loads(manifest.read_text())
    other = sorted(key for key in identity if held.get(key) != identity[key])
    if other:
        rule = f"was made from another {' and '.join(other)}"
        raise ProblemsFound([bad_cache(manifest.parent, rule)])


def bad_cache(folder: Path, rule: str) -> Problem:
    """What is wrong with a cache, in the form of a problem."""
    remedy = "Name another folder, or remove this one"
    return Problem(name="latent cache", value=str(folder), rule=rule, remedy=remedy)

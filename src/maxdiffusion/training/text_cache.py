"""What a text encoder makes of the captions of a cache, so that training need not run it.

<folder>/text.json                 which text encoder made them
<folder>/text-00000.safetensors    text [n T E]: the rows of the captions of shard-00000
<folder>/empty-caption.safetensors text [T E]: the rows of the empty caption
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from maxdiffusion.runtime.problems import ProblemsFound
from maxdiffusion.training.cached_clips import CachedClips, Shard
from maxdiffusion.training.data import Sample
from maxdiffusion.training.latent_cache import (
    Advance,
    Share,
    agree,
    bad_cache,
    save_shard,
    shard_file,
)
from maxdiffusion.training.text import padded_ids

TEXT_MANIFEST, EMPTY, TEXT = "text.json", "empty-caption.safetensors", "text"
AT_ONCE = 16
# tokens [B T] and their numbers [B] -> rows [B T E], zero after the last token
EncodeText = Callable[[np.ndarray, np.ndarray], np.ndarray]


def text_file(shard: Path) -> Path:
    """Where the rows of a shard's captions are kept."""
    return shard_file(shard.parent, int(shard.stem.split("-")[1]), TEXT)


def missing_text(clips: CachedClips) -> tuple[Path, ...]:
    """The shards whose captions were not encoded yet."""
    return tuple(file for file in clips.files if not text_file(file).exists())


def lacks_text(folder: Path) -> bool:
    """Whether captions of a cache were not encoded yet, or the empty one was not."""
    return bool(missing_text(CachedClips(folder))) or not (folder / EMPTY).exists()


def fill_text(
    folder: Path,
    *,
    model: str,
    empty: Sequence[int],
    encode: EncodeText,
    share: Share | None = None,
    advance: Advance = lambda: None,
) -> None:
    """Encodes the captions of every shard of the share that lacks them; `model` is a hash."""
    clips = CachedClips(folder)
    agree(folder / TEXT_MANIFEST, {"text_encoder": model})
    if not (folder / EMPTY).exists():
        ids = padded_ids([tuple(empty)], clips.caption_tokens)
        rows = encode(ids, np.array([len(empty)], np.int32))[0]
        save_shard(folder / EMPTY, {TEXT: rows.astype(np.float32)})
    for file in (share or Share()).of(clips.files):
        if not text_file(file).exists():
            save_shard(text_file(file), {TEXT: _encoded(Shard(file), encode)})
        advance()


def _encoded(shard: Shard, encode: EncodeText) -> np.ndarray:
    """The rows of all captions of a shard."""
    ids, lengths = shard.whole("ids"), shard.whole("lengths")
    rows = [
        encode(ids[at : at + AT_ONCE], lengths[at : at + AT_ONCE])
        for at in range(0, len(ids), AT_ONCE)
    ]
    # A shard without any clip has no rows, of no width.
    found = np.concatenate(rows) if rows else np.zeros((0, ids.shape[1], 0))
    return found.astype(np.float32)


class ClipsWithText:
    """Latents of clips, and the rows that a text encoder made of their captions."""

    def __init__(self, folder: Path):
        self._clips = CachedClips(folder)
        missing = missing_text(self._clips)
        if missing or not (folder / EMPTY).exists():
            rule = (
                f"holds no encoded captions for {len(missing)} of {len(self._clips.files)} shards"
            )
            raise ProblemsFound([bad_cache(folder, rule)])
        self._text = tuple(Shard(text_file(file)) for file in self._clips.files)
        self.empty: np.ndarray = Shard(folder / EMPTY).whole(TEXT)

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, index: int) -> Sample:
        """The latents and the text rows of one clip."""
        number, row = self._clips.place(index)
        latents = self._clips.shards[number].read(row, ("latents",))
        return latents | self._text[number].read(row)

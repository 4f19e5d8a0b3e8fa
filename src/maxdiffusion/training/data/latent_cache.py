"""Cache of latents, tokens and text embeddings of clips, in safetensors shards.

    <folder>/manifest.json              cache key of the shards
    <folder>/shard-00000.safetensors    latents [n F Y X C], ids [n T], lengths [n], and for
                                        models that need them image [n F Y X C], image_tokens
                                        [n I O]: first frames, by autoencoder and by CLIP
    <folder>/skipped.jsonl              clips that could not be used, and why
    <folder>/text.json                  cache key of the text embeddings
    <folder>/text-00000.safetensors     text [n T E]: embeddings of the captions of shard-00000
    <folder>/empty-caption.safetensors  text [T E]: embedding of the empty caption

Shards are written one by one and appear when they are complete: after an interruption, a run
continues with the first missing one.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from safetensors.numpy import save_file

from maxdiffusion.checkpoints.safetensors_io import FLOAT_DTYPES
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.runtime.files import (
    CacheKey,
    FilePath,
    add_new_json_lines,
    digest_value,
    read_json_lines,
    read_range,
    replacing,
    size_in_bytes,
    writing,
)
from maxdiffusion.training.data.batches import Sample
from maxdiffusion.training.data.video_folder import UnusableClip
from maxdiffusion.training.image_conditioning import first_frames
from maxdiffusion.training.text import padded_ids

MANIFEST, SKIPPED = "manifest.json", "skipped.jsonl"
LATENTS, IMAGE = "latents", "image"  # of a clip, and of its first frame and mid grey
IMAGE_TOKENS = "image_tokens"  # of a first frame
ENCODED = (LATENTS, IMAGE, IMAGE_TOKENS)
OPENERS = 16  # shards that are opened at the same time
Encode = Callable[[np.ndarray], np.ndarray]  # videos [B F Y X 3] in 0..255 -> normalised latents
EncodeFrames = Callable[[np.ndarray], np.ndarray]  # frames [B Y X 3] in 0..255 -> tokens [B I O]
Tokenize = Callable[[str], Sequence[int]]
Advance = Callable[[], None]


@runtime_checkable
class CaptionedClips(Protocol):
    """Interface of clips by number, with captions."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...
    def caption(self, index: int) -> str:
        """Returns the caption of a clip."""

    def describe(self) -> dict[str, object]:
        """Returns everything that the clips depend on, as JSON values."""


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """Sizes of shards and batches; `model` is a digest of the components that encode.

    `arrays` are what is stored of a clip: its latents, and its first frame for some models.
    """

    model: str
    caption_tokens: int
    arrays: tuple[str, ...] = (LATENTS,)
    shard: int = 512
    batch: int = 16

    def __post_init__(self) -> None:
        if self.shard < 1 or self.batch < 1 or self.caption_tokens < 1:
            raise ValueError(f"{self}: all sizes must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Share:
    """The shards that one of `count` processes writes."""

    index: int = 0
    count: int = 1

    def of(self, shards: Sequence[Any]) -> Sequence[Any]:
        """Returns every `count`-th shard."""
        return shards[self.index :: self.count]


def shard_numbers(clips: int, shard: int) -> range:
    """Returns the numbers of the shards of `clips` clips."""
    return range(-(-clips // shard))


def fill_cache(
    folder: FilePath,
    clips: CaptionedClips,
    plan: CachePlan,
    *,
    encode: Encode,
    tokenize: Tokenize,
    encode_frames: EncodeFrames | None = None,
    share: Share | None = None,
    advance: Advance = lambda: None,
) -> None:
    """Writes every missing shard of the share; calls `advance` after each."""
    claim_cache(folder / MANIFEST, _cache_key(clips, plan))
    for number in (share or Share()).of(shard_numbers(len(clips), plan.shard)):
        file = shard_file(folder, number)
        if not file.exists():
            indices = range(number * plan.shard, min(len(clips), (number + 1) * plan.shard))
            encoder = ClipEncoder(arrays=plan.arrays, videos=encode, frames=encode_frames)
            tensors = _encoded(clips, indices, plan, encoder, tokenize, skipped=folder / SKIPPED)
            save_shard(file, tensors)
        advance()


@dataclass(frozen=True, kw_only=True)
class ClipEncoder:
    """Makes the stored arrays of clips from their frames."""

    arrays: tuple[str, ...]
    videos: Encode
    frames: EncodeFrames | None = None

    def __call__(self, videos: np.ndarray) -> dict[str, np.ndarray]:
        """Returns every array of videos [B F Y X 3]."""
        return {name: self._array(name, videos).astype(np.float32) for name in self.arrays}

    def _array(self, name: str, videos: np.ndarray) -> np.ndarray:
        if name == IMAGE_TOKENS:
            assert self.frames is not None
            return self.frames(videos[:, 0])
        return self.videos(first_frames(videos) if name == IMAGE else videos)


def _encoded(
    clips: CaptionedClips,
    indices: Sequence[int],
    plan: CachePlan,
    encode: ClipEncoder,
    tokenize: Tokenize,
    *,
    skipped: FilePath,
) -> dict[str, np.ndarray]:
    """Returns the tensors of a shard; without latents if none of its clips can be used."""
    encoded: dict[str, list[np.ndarray]] = {name: [] for name in plan.arrays}
    texts: list[tuple[int, ...]] = []
    bad: list[dict[str, Any]] = []
    for group in _groups(_usable(clips, indices, bad), plan.batch):
        videos = np.stack([video for _, video in group])
        for name, array in encode(videos).items():
            encoded[name].append(array)
        texts += [tuple(tokenize(clips.caption(index))) for index, _ in group]
    add_new_json_lines(skipped, bad)
    held = {name: np.concatenate(found) for name, found in encoded.items() if found}
    return held | {
        "ids": padded_ids(texts, plan.caption_tokens),
        "lengths": np.asarray([len(text) for text in texts], np.int32),
    }


def _usable(
    clips: CaptionedClips, indices: Sequence[int], bad: list[dict[str, Any]]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields numbers and frames of usable clips; adds the others to `bad`."""
    for index in indices:
        try:
            yield index, clips[index]["video"]
        except UnusableClip as error:
            bad.append({"clip": index, "reason": str(error)})


def _groups(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Yields items in lists of `size`; the last one may be shorter."""
    group: list[Any] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def save_shard(file: FilePath, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a shard, which appears when it is complete."""
    with writing(f"the shard {file.name}", file.parent), replacing(file) as unfinished:
        save_file(dict(tensors), unfinished)


def shard_file(folder: FilePath, number: int, kind: str = "shard") -> FilePath:
    """Returns the path of a shard."""
    return folder / f"{kind}-{number:05d}.safetensors"


def _cache_key(clips: CaptionedClips, plan: CachePlan) -> CacheKey:
    facts = {
        "clips": digest_value(clips.describe()),
        "count": len(clips),
        "model": plan.model,
        "caption_tokens": plan.caption_tokens,
        "shard": plan.shard,
    }
    # Latents alone are not stated, as caches of earlier versions do not state them.
    return CacheKey(facts if plan.arrays == (LATENTS,) else {**facts, "arrays": plan.arrays})


def claim_cache(manifest: FilePath, key: CacheKey) -> None:
    """Writes the key of a new cache. Raises ProblemsFound if the cache has another key."""
    if not manifest.exists():
        with writing(manifest.name, manifest.parent), replacing(manifest) as unfinished:
            unfinished.write_text(json.dumps(key.facts, indent=2) + "\n")
        return
    changed = key.differences(json.loads(manifest.read_text()))
    if changed:
        rule = f"was made with other inputs: {'; '.join(changed)}"
        raise ProblemsFound([bad_cache(manifest.parent, rule)])


def bad_cache(folder: FilePath, rule: str) -> Problem:
    """Returns the problem of a cache that cannot be used."""
    remedy = "Name another folder, or remove this one"
    return Problem(name="latent cache", value=str(folder), rule=rule, remedy=remedy)


class CachedClips:
    """Samples of a full cache: latents, tokens and token counts of clips."""

    def __init__(self, folder: FilePath):
        self._folder = folder
        if not (folder / MANIFEST).is_file() or not self.files:
            raise ProblemsFound([bad_cache(folder, "holds no cached latents")])
        if not len(self):
            count = len(read_json_lines(folder / SKIPPED))
            rule = f"holds no clip: all {count} could not be used, as {SKIPPED} in it lists"
            raise ProblemsFound([bad_cache(folder, rule)])

    @cached_property
    def files(self) -> tuple[FilePath, ...]:
        """The shards, in their order."""
        return tuple(sorted(self._folder.glob("shard-*.safetensors")))

    @cached_property
    def shards(self) -> tuple["Shard", ...]:
        """The shards, opened."""
        return open_shards(self.files)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([shard.rows("lengths") for shard in self.shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """Returns the position in `shards` of a clip's shard, and its row there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - (int(self._ends[number - 1]) if number else 0)

    def __getitem__(self, index: int) -> Sample:
        """Returns latents, tokens and token count of one clip."""
        number, row = self.locate(index)
        return self.shards[number].read(row)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Frames, rows, columns and channels of every clip."""
        number, _ = self.locate(0)
        return self.shards[number].shape(LATENTS)[1:]

    @property
    def caption_tokens(self) -> int:
        """The length to which captions are padded."""
        return self.shards[0].shape("ids")[1]


INTEGERS = {f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)}
NUMPY_DTYPES: Mapping[str, np.dtype] = {**FLOAT_DTYPES, **INTEGERS}
FIRST_READ = 4096  # bytes; most headers are shorter, and each read from object storage takes time


class Shard:
    """Tensors with the same number of rows in one safetensors file; reads single rows.

    A row is one read of its bytes, so that a training reads a cache in object storage as it goes:
    nothing is copied to a disk. Threads may read at once.
    """

    def __init__(self, file: FilePath):
        self._file = file
        first = read_range(file, 0, FIRST_READ)
        length = int.from_bytes(first[:8], "little")
        text = first[8 : 8 + length]
        if len(text) < length:
            text = read_range(file, 8, length)
        try:
            header = json.loads(text)
            header.pop("__metadata__", None)
            self._tensors = {name: _tensor(held, 8 + length) for name, held in header.items()}
            end = max(start + size for start, size, _, _ in self._tensors.values())
        except (ValueError, KeyError) as error:
            rule = f"holds {file.name}, which is no shard ({error})"
            raise ProblemsFound([bad_cache(file.parent, rule)]) from error
        if end != size_in_bytes(file):
            rule = f"holds {file.name} of {size_in_bytes(file)} bytes in place of {end}"
            raise ProblemsFound([bad_cache(file.parent, rule)])

    def read(self, row: int, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Returns one row of the tensors (None: of all)."""
        return {name: self._row(name, row) for name in names or self._tensors}

    def _row(self, name: str, row: int) -> np.ndarray:
        start, size, dtype, shape = self._tensors[name]
        if not 0 <= row < shape[0]:
            raise IndexError(f"row {row} of {shape[0]} of {self._file}")
        bytes_of_row = size // shape[0]
        content = read_range(self._file, start + row * bytes_of_row, bytes_of_row)
        return np.frombuffer(content, dtype).reshape(shape[1:])

    def held(self, *names: str) -> tuple[str, ...]:
        """Returns those of the names that the file has a tensor for."""
        return tuple(name for name in names if name in self._tensors)

    def whole(self, name: str) -> np.ndarray:
        """Returns a whole tensor."""
        start, size, dtype, shape = self._tensors[name]
        return np.frombuffer(read_range(self._file, start, size), dtype).reshape(shape)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self._tensors[name][3]

    def rows(self, name: str) -> int:
        """Returns the number of rows there are."""
        return self.shape(name)[0]


def _tensor(held: Mapping[str, Any], data: int) -> tuple[int, int, np.dtype, tuple[int, ...]]:
    """Returns first byte, bytes, dtype and shape of a tensor; `data` is the end of the header."""
    start, stop = held["data_offsets"]
    return data + start, stop - start, NUMPY_DTYPES[held["dtype"]], tuple(held["shape"])


def open_shards(files: Sequence[FilePath]) -> tuple[Shard, ...]:
    """Returns the shards of files, opened at the same time: each takes a read or two."""
    with ThreadPoolExecutor(OPENERS) as pool:
        return tuple(pool.map(Shard, files))


TEXT_MANIFEST, EMPTY, TEXT = "text.json", "empty-caption.safetensors", "text"
AT_ONCE = 16
# tokens [B T] and their numbers [B] -> rows [B T E], zero after the last token
EncodeText = Callable[[np.ndarray, np.ndarray], np.ndarray]


def text_file(shard: FilePath) -> FilePath:
    """Returns the path of the text embeddings of a shard."""
    return shard_file(shard.parent, int(shard.stem.split("-")[1]), TEXT)


def missing_text(clips: CachedClips) -> tuple[FilePath, ...]:
    """Returns the shards without text embeddings."""
    return tuple(file for file in clips.files if not text_file(file).exists())


def lacks_text(folder: FilePath) -> bool:
    """Returns whether a cache lacks text embeddings, or that of the empty caption."""
    return bool(missing_text(CachedClips(folder))) or not (folder / EMPTY).exists()


def fill_text(
    folder: FilePath,
    *,
    model: str,
    empty: Sequence[int],
    encode: EncodeText,
    share: Share | None = None,
    advance: Advance = lambda: None,
) -> None:
    """Encodes the captions of every shard of the share that lacks them; `model` is a digest."""
    clips = CachedClips(folder)
    claim_cache(folder / TEXT_MANIFEST, CacheKey({"text_encoder": model}))
    if not (folder / EMPTY).exists():
        ids = padded_ids([tuple(empty)], clips.caption_tokens)
        rows = encode(ids, np.array([len(empty)], np.int32))[0]
        save_shard(folder / EMPTY, {TEXT: rows.astype(np.float32)})
    for file in (share or Share()).of(clips.files):
        if not text_file(file).exists():
            save_shard(text_file(file), {TEXT: _encoded_text(Shard(file), encode)})
        advance()


def _encoded_text(shard: Shard, encode: EncodeText) -> np.ndarray:
    """Returns the text embeddings of a shard."""
    ids, lengths = shard.whole("ids"), shard.whole("lengths")
    rows = [
        encode(ids[at : at + AT_ONCE], lengths[at : at + AT_ONCE])
        for at in range(0, len(ids), AT_ONCE)
    ]
    # A shard without clips has no embeddings, of width 0.
    found = np.concatenate(rows) if rows else np.zeros((0, ids.shape[1], 0))
    return found.astype(np.float32)


class ClipsWithText:
    """Samples of a full cache: latents and text embeddings of clips."""

    def __init__(self, folder: FilePath):
        self._clips = CachedClips(folder)
        missing = missing_text(self._clips)
        if missing or not (folder / EMPTY).exists():
            rule = (
                f"holds no encoded captions for {len(missing)} of {len(self._clips.files)} shards"
            )
            raise ProblemsFound([bad_cache(folder, rule)])
        self._text = open_shards([text_file(file) for file in self._clips.files])
        self.empty: np.ndarray = Shard(folder / EMPTY).whole(TEXT)

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, index: int) -> Sample:
        """Returns the encoded videos and the text embeddings of one clip."""
        number, row = self._clips.locate(index)
        shard = self._clips.shards[number]
        return shard.read(row, shard.held(*ENCODED)) | self._text[number].read(row)

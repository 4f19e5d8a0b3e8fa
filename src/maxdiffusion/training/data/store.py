"""Clips encoded once: from frames and captions to the latents and text that experts train on."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import jax

from maxdiffusion.commands.clip_sets import ClipSet
from maxdiffusion.commands.training_models import WHOLE_CLIP_PIXELS, clip_encoder, text_encoder
from maxdiffusion.commands.training_settings import caption_length
from maxdiffusion.config.config import Config
from maxdiffusion.pipelines.prompts import PromptTokenizer
from maxdiffusion.pipelines.shapes import LatentShape, VideoShape, latent_shape
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.runtime.coordination import barrier
from maxdiffusion.runtime.disk import room_problems
from maxdiffusion.runtime.marks import MARKS
from maxdiffusion.runtime.places import place
from maxdiffusion.runtime.problems import ProblemsFound
from maxdiffusion.runtime.progress import Advance, steps_bar
from maxdiffusion.training.cached_clips import CachedClips
from maxdiffusion.training.data import Samples
from maxdiffusion.training.latent_cache import (
    CachePlan,
    Share,
    fill_cache,
    shard_file,
    shard_numbers,
)
from maxdiffusion.training.text import Captions, EncodedBefore
from maxdiffusion.training.text_cache import ClipsWithText, fill_text, lacks_text
from maxdiffusion.training.wan_loss import ClipBatch
from maxdiffusion.training.wan_training import StoredText, TextSource, Tokens
from maxdiffusion.weights.folder import ModelFolder

SHARD, SHARD_BYTES = 512, 2**29
BATCH = 16
FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ClipStore:
    """Clips of a config in the caches of its model: what they become, and how they are read."""

    config: Config
    folder: ModelFolder
    spec: WanSpec
    sets: Sequence[ClipSet]
    tokenizer: PromptTokenizer
    caption_tokens: int

    @classmethod
    def of(
        cls, config: Config, folder: ModelFolder, spec: WanSpec, sets: Sequence[ClipSet]
    ) -> "ClipStore":
        """The store of these clips; nothing is encoded yet."""
        tokenizer = PromptTokenizer.load(folder.root / "tokenizer")
        length = config.max_sequence_length
        tokens = max(
            caption_length(held.clips, lambda text: tokenizer.ids(text, length), length)
            for held in sets
        )
        return cls(
            config=config,
            folder=folder,
            spec=spec,
            sets=sets,
            tokenizer=tokenizer,
            caption_tokens=tokens,
        )

    @property
    def keeps_text(self) -> bool:
        """Whether captions are encoded beforehand: they are if their encoder is not trained."""
        config = self.config
        return config.cache_latents_text_encoder_outputs and not config.train_text_encoder

    @property
    def empty_caption(self) -> tuple[int, ...]:
        """The tokens of the empty caption."""
        return self.tokenizer.ids("", self.config.max_sequence_length)

    def latent(self, held: ClipSet) -> LatentShape:
        """What one clip of a set is inside the model."""
        size = held.size
        video = VideoShape(height=size.height, width=size.width, num_frames=size.frames)
        return latent_shape(video, self.spec.vae, self.spec.transformer)

    @cached_property
    def _model(self) -> str:
        return model_hash(self.folder)

    def plan(self, held: ClipSet) -> CachePlan:
        """How the clips of a set become shards."""
        size = held.size
        pixels = size.frames * size.height * size.width
        clip_bytes = FLOAT_BYTES * prod(self.latent(held).dims)
        devices = jax.local_device_count()
        return CachePlan(
            model=self._model,
            caption_tokens=self.caption_tokens,
            shard=max(1, min(SHARD, SHARD_BYTES // clip_bytes)),
            batch=devices * max(1, min(BATCH // devices, WHOLE_CLIP_PIXELS // pixels)),
        )

    def fill(self) -> None:
        """Encodes what is not in the caches yet, with progress; processes share the shards."""
        plans = [(held, self.plan(held)) for held in self.sets]
        missing = {held.cache: len(_missing(held, plan)) for held, plan in plans}
        self._check_room(plans, missing)
        encode = clip_encoder(self.folder, self.spec) if any(missing.values()) else _never
        limit = min(self.config.max_sequence_length, self.caption_tokens)
        tokenize = partial(self.tokenizer.ids, max_sequence_length=limit)
        total = sum(len(_share().of(_shards(held, plan))) for held, plan in plans)
        with shards_bar("Encoding clips", total) as advance:
            for held, plan in plans:
                fill_cache(
                    held.cache,
                    held.clips,
                    plan,
                    encode=encode,
                    tokenize=tokenize,
                    share=_share(),
                    advance=advance,
                )
        barrier("clips encoded")  # the shards of other processes are read as well
        if self.keeps_text:
            self._fill_text()

    def _fill_text(self) -> None:
        caches = [held.cache for held in self.sets]
        encode = text_encoder(self.folder, self.spec) if any(map(lacks_text, caches)) else _never
        model = model_hash(self.folder, ("text_encoder", "tokenizer"))
        total = sum(len(_share().of(CachedClips(cache).files)) for cache in caches)
        with shards_bar("Encoding captions", total) as advance:
            for cache in caches:
                fill_text(
                    cache,
                    model=model,
                    empty=self.empty_caption,
                    encode=encode,
                    share=_share(),
                    advance=advance,
                )
        barrier("captions encoded")

    def read(self) -> tuple[tuple[Samples, ...], TextSource]:
        """The samples of every set, and how their captions are read, from filled caches."""
        caches = [held.cache for held in self.sets]
        if not self.keeps_text:
            return tuple(map(CachedClips, caches)), Tokens(empty=self.empty_caption)
        stored = tuple(map(ClipsWithText, caches))
        return stored, StoredText(empty=stored[0].empty)

    def _check_room(
        self, plans: Sequence[tuple[ClipSet, CachePlan]], missing: Mapping[Path, int]
    ) -> None:
        """Raises a problem if what is still to be written does not fit on the disk."""
        text = self.caption_tokens * self.spec.text_encoder.width if self.keeps_text else 0
        needed = 0
        for held, plan in plans:
            clips = min(len(held.clips), missing[held.cache] * plan.shard)
            needed += FLOAT_BYTES * clips * (prod(self.latent(held).dims) + text)
        cache = place(self.config.latent_cache_dir)
        problems = list(room_problems("latent_cache_dir", cache, needed))
        if problems:
            raise ProblemsFound(problems)


def _share() -> Share:
    return Share(index=jax.process_index(), count=jax.process_count())


@contextmanager
def shards_bar(description: str, total: int) -> Iterator[Advance]:
    """A bar of shards; the watch over all processes hears of each as well."""
    with steps_bar(description, total, unit="shard") as advance:

        def done() -> None:
            MARKS.stir()
            advance()

        yield done


def _shards(held: ClipSet, plan: CachePlan) -> range:
    return shard_numbers(len(held.clips), plan.shard)


def _missing(held: ClipSet, plan: CachePlan) -> list[int]:
    numbers = _share().of(_shards(held, plan))
    return [number for number in numbers if not shard_file(held.cache, number).exists()]


def _never(*_: Any) -> Any:
    raise AssertionError("nothing is missing")


def model_hash(folder: ModelFolder, parts: Sequence[str] = ("vae", "tokenizer")) -> str:
    """A hash of the parts of a model that cached clips depend on."""
    digest = hashlib.sha256()
    for name in parts:
        for file in sorted((folder.root / name).glob("*")):
            digest.update(file.name.encode())
            _add_file(digest.update, file)
    return digest.hexdigest()


def _add_file(update: Callable[[bytes], None], file: Path, piece: int = 2**24) -> None:
    with file.open("rb") as stream:
        while content := stream.read(piece):
            update(content)


def as_clip_batch(rows: Mapping[str, Any]) -> ClipBatch:
    """A batch of cached clips, still on the host."""
    if "text" in rows:
        return ClipBatch(latents=rows["latents"], captions=EncodedBefore(rows=rows["text"]))
    captions = Captions(ids=rows["ids"], lengths=rows["lengths"])
    return ClipBatch(latents=rows["latents"], captions=captions)

"""Clips of a config, encoded once: from frames and captions to latents and text embeddings.

clip_sets   the clips of a config by the size that they are trained at
ClipStore   fills the caches of these sets, and reads them
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from maxdiffusion.checkpoints.diffusers_folder import ModelFolder
from maxdiffusion.config import Config
from maxdiffusion.distributed.coordination import barrier
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.pipelines.request import LatentShape, VideoShape, check_video_shape, latent_shape
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.pipelines.text import PromptTokenizer
from maxdiffusion.runtime.files import (
    FilePath,
    add_new_json_lines,
    as_path,
    check_free_space,
    digest_files,
    digest_value,
)
from maxdiffusion.runtime.progress import PROGRESS, Advance, steps_bar
from maxdiffusion.training.data.batches import Samples, SyntheticClips
from maxdiffusion.training.data.latent_cache import (
    IMAGE,
    IMAGE_TOKENS,
    LATENTS,
    SKIPPED,
    CachedClips,
    CachePlan,
    CaptionedClips,
    ClipsWithText,
    Share,
    fill_cache,
    fill_text,
    lacks_text,
    shard_file,
    shard_numbers,
)
from maxdiffusion.training.data.synthetic import Pool
from maxdiffusion.training.data.video_folder import (
    ClipSize,
    Sorted,
    VideoClips,
    sort_videos,
    videos_in,
)
from maxdiffusion.training.image_conditioning import (
    FIRST_FRAME,
    ImageConditioning,
    KnownFirstFrame,
    image_conditioning,
)
from maxdiffusion.training.loss import ClipBatch
from maxdiffusion.training.models import (
    WHOLE_CLIP_PIXELS,
    clip_encoder,
    frame_encoder,
    text_encoder,
)
from maxdiffusion.training.settings import caption_length, clip_size, clips
from maxdiffusion.training.text import Captions, EncodedBefore
from maxdiffusion.training.wan import Latent, StoredText, TextSource, Tokens

SIZES, HELD_OUT = "sizes.jsonl", "held_out"
RECORDS = "tfrecord"  # a dataset_type


@dataclass(frozen=True, kw_only=True)
class ClipSet:
    """Clips of one size, and the folder of their latent cache."""

    clips: CaptionedClips
    size: ClipSize
    cache: FilePath


def clip_sets(config: Config, spec: WanSpec) -> tuple[ClipSet, ...]:
    """Returns the clips of a config: one set, or one for each bucket that has clips."""
    image_conditioning(config, spec)  # a model that cannot be trained is refused first
    root = as_path(config.latent_cache_dir)
    if not config.video_buckets:
        return (ClipSet(clips=clips(config), size=clip_size(config), cache=root),)
    buckets = bucket_sizes(config)
    check_sizes(buckets, spec)
    videos = videos_in(Path(config.train_data_dir).expanduser())
    with steps_bar("Measuring clips", len(videos), unit="clip") as advance:
        found = sort_videos(videos, buckets, notes=root / SIZES, advance=advance)
    list_left_out(root, found, buckets)
    return tuple(
        ClipSet(clips=VideoClips(videos=held, size=size), size=size, cache=root / str(size))
        for size, held in found.buckets.items()
    )


def held_out_sets(config: Config, spec: WanSpec) -> tuple[ClipSet, ...]:
    """Returns the clips of evaluations, in caches of their own; none if none are asked for."""
    if config.eval_every < 1:
        return ()
    check_held_out(config)
    cache = f"{config.latent_cache_dir}/{HELD_OUT}"
    own = replace(config, train_data_dir=config.eval_data_dir, latent_cache_dir=cache)
    sets = clip_sets(own, spec)
    if config.dataset_type != "synthetic":
        return sets
    (held,) = sets
    assert isinstance(held.clips, SyntheticClips)
    # Combinations of colour, shape and motion that training never sees.
    unseen = replace(held.clips, pool=Pool.HELD_OUT, count=config.num_eval_samples)
    return (replace(held, clips=unseen),)


def check_held_out(config: Config) -> None:
    """Raises ProblemsFound unless an evaluation has clips that are not trained on."""
    name, value, rule = "eval_data_dir", config.eval_data_dir, ""
    if config.dataset_type != "synthetic" and not value:
        rule = f"is needed for an evaluation every {config.eval_every} steps"
    elif value and as_path(value) == as_path(config.train_data_dir):
        rule = "must not be train_data_dir: clips that are trained on are not held out"
    if rule:
        remedy = "Set it to a folder of other clips, or set eval_every=-1"
        raise ProblemsFound([Problem(name=name, value=value, rule=rule, remedy=remedy)])


def bucket_sizes(config: Config) -> tuple[ClipSize, ...]:
    """Returns the sizes of `video_buckets`."""
    buckets: Sequence[Sequence[int]] = config.video_buckets
    rule, remedy = "", "Write it as [[17,480,832],[17,832,480]]"
    if config.dataset_type != "videos":
        rule, remedy = "buckets are for dataset_type=videos", "Leave video_buckets out"
    elif any(len(bucket) != 3 for bucket in buckets):
        rule = "every bucket must be [frames, height, width]"
    elif len({tuple(bucket) for bucket in buckets}) != len(buckets):
        rule, remedy = "has a bucket twice", "Leave one of the two out"
    if rule:
        name = "video_buckets"
        raise ProblemsFound([Problem(name=name, value=list(buckets), rule=rule, remedy=remedy)])
    return tuple(ClipSize(frames=f, height=h, width=w) for f, h, w in buckets)


def check_sizes(buckets: Sequence[ClipSize], spec: WanSpec) -> None:
    """Raises ProblemsFound with every size that the model cannot process."""
    shapes = [
        VideoShape(height=size.height, width=size.width, num_frames=size.frames) for size in buckets
    ]
    problems = Collector()
    for shape in shapes:
        with problems:
            check_video_shape(shape, spec.vae, spec.transformer)
    problems.raise_if_any()


def check_lengths(sizes: Sequence[ClipSize], image: ImageConditioning) -> None:
    """Raises ProblemsFound if clips have no frame but the known one, so that nothing is learnt."""
    short = [size for size in sizes if size.frames == 1 and isinstance(image, KnownFirstFrame)]
    if short:
        rule = f"the only frame is known (train_image_conditioning={FIRST_FRAME})"
        remedy = "Use clips of 5 frames or more, or train_image_conditioning=none"
        value = [str(size) for size in short]
        raise ProblemsFound([Problem(name="clips", value=value, rule=rule, remedy=remedy)])


def list_left_out(root: FilePath, found: Sorted, buckets: Sequence[ClipSize]) -> None:
    """Lists the videos that fit no bucket. Raises ProblemsFound if none fits."""
    lines = [{"clip": file.name, "reason": why} for file, why in found.left_out.items()]
    add_new_json_lines(root / SKIPPED, lines)
    if not found.buckets:
        name, value = "video_buckets", [str(size) for size in buckets]
        rule = f"none of {len(lines)} videos fits, such as {lines[0]['reason']}"
        remedy = "Add a smaller bucket, or larger videos"
        raise ProblemsFound([Problem(name=name, value=value, rule=rule, remedy=remedy)])


SHARD, SHARD_BYTES = 512, 2**29
BATCH = 16
FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ClipStore:
    """Fills and reads the caches of a config's clips."""

    config: Config
    folder: ModelFolder
    spec: WanSpec
    sets: Sequence[ClipSet]
    tokenizer: PromptTokenizer
    caption_tokens: int
    image: ImageConditioning
    trained: int  # the first sets; the others are held out

    @classmethod
    def of(
        cls,
        config: Config,
        folder: ModelFolder,
        spec: WanSpec,
        sets: Sequence[ClipSet],
        *,
        held_out: Sequence[ClipSet] = (),
    ) -> "ClipStore":
        """Returns the store of clips to train on and of held-out ones; encodes nothing yet."""
        trained, sets = len(sets), (*sets, *held_out)
        image = image_conditioning(config, spec)
        check_lengths([held.size for held in sets], image)
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
            image=image,
            trained=trained,
        )

    @property
    def keeps_text(self) -> bool:
        """True if text embeddings are cached, which needs a frozen text encoder."""
        config = self.config
        return config.cache_latents_text_encoder_outputs and not config.train_text_encoder

    @property
    def empty_caption(self) -> tuple[int, ...]:
        """The tokens of the empty caption."""
        return self.tokenizer.ids("", self.config.max_sequence_length)

    def describe(self) -> str:
        """Returns one line for a report."""
        clips = sum(len(held.clips) for held in self.sets[: self.trained])
        sizes = " or ".join(str(held.size) for held in self.sets[: self.trained])
        return f"{self.config.latent_cache_dir}: {clips} clips of {sizes}"

    def latent(self, held: ClipSet) -> LatentShape:
        """Returns the latent shape of the clips of a set."""
        size = held.size
        video = VideoShape(height=size.height, width=size.width, num_frames=size.frames)
        return latent_shape(video, self.spec.vae, self.spec.transformer)

    @property
    def latents(self) -> list[Latent]:
        """Frames, rows and columns of the latents of every set."""
        return [self.latent(held).dims[:3] for held in self.sets]

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays that are stored of a clip."""
        image = (IMAGE,) if self.image.stores_image else ()
        return (LATENTS, *image, *((IMAGE_TOKENS,) if self.image.attended_tokens else ()))

    def _values(self, held: ClipSet) -> int:
        """Returns the number of values that are stored of one clip."""
        videos = len({LATENTS, IMAGE} & {*self.arrays})
        tokens = self.image.attended_tokens * (self.spec.transformer.image_dim or 0)
        return videos * prod(self.latent(held).dims) + tokens

    @cached_property
    def _model(self) -> str:
        return model_hash(self.folder, MODELS if self.image.attended_tokens else MODELS[:2])

    def plan(self, held: ClipSet) -> CachePlan:
        """Returns the sizes of shards and batches for a set."""
        size = held.size
        pixels = size.frames * size.height * size.width
        clip_bytes = FLOAT_BYTES * self._values(held)
        devices = jax.local_device_count()
        return CachePlan(
            model=self._model,
            caption_tokens=self.caption_tokens,
            arrays=self.arrays,
            shard=max(1, min(SHARD, SHARD_BYTES // clip_bytes)),
            batch=devices * max(1, min(BATCH // devices, WHOLE_CLIP_PIXELS // pixels)),
        )

    def fill(self) -> None:
        """Encodes the missing shards; processes share them."""
        plans = [(held, self.plan(held)) for held in self.sets]
        missing = {held.cache: len(_missing(held, plan)) for held, plan in plans}
        self._check_free_space(plans, missing)
        encode, frames = _never, _never
        if any(missing.values()):
            encode = clip_encoder(self.folder, self.spec)
            if self.image.attended_tokens:
                frames = frame_encoder(self.folder, self.spec)
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
                    encode_frames=frames,
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
        """Returns the samples of every set and the source of their captions, from full caches."""
        caches = [held.cache for held in self.sets]
        if not self.keeps_text:
            return tuple(map(CachedClips, caches)), Tokens(empty=self.empty_caption)
        stored = tuple(map(ClipsWithText, caches))
        return stored, StoredText(empty=stored[0].empty)

    def _check_free_space(
        self, plans: Sequence[tuple[ClipSet, CachePlan]], missing: Mapping[FilePath, int]
    ) -> None:
        """Raises ProblemsFound if the missing shards do not fit on the disk."""
        text = self.caption_tokens * self.spec.text_encoder.width if self.keeps_text else 0
        needed = 0
        for held, plan in plans:
            clips = min(len(held.clips), missing[held.cache] * plan.shard)
            needed += FLOAT_BYTES * clips * (self._values(held) + text)
        cache = as_path(self.config.latent_cache_dir)
        check_free_space("latent_cache_dir", cache, needed)


@runtime_checkable
class TrainingStore(Protocol):
    """Interface of the clips of a config: sets of one size; the first `trained` are trained on."""

    @property
    def trained(self) -> int: ...
    @property
    def latents(self) -> list[Latent]:
        """Frames, rows and columns of the latents of every set."""

    @property
    def caption_tokens(self) -> int:
        """The length to which captions are padded."""

    @property
    def empty_caption(self) -> tuple[int, ...]:
        """The tokens of the empty caption."""

    def describe(self) -> str:
        """Returns one line for a report."""

    def fill(self) -> None:
        """Encodes whatever is missing."""

    def read(self) -> tuple[tuple[Samples, ...], TextSource]:
        """Returns the samples of every set, and the source of their captions."""


def open_store(config: Config, folder: ModelFolder, spec: WanSpec) -> TrainingStore:
    """Returns the clips of a config, those of its evaluations included."""
    if config.dataset_type == RECORDS:
        from maxdiffusion.training.data.records import open_records  # for records alone

        if config.eval_every > 0:
            check_held_out(config)
        return open_records(config, folder, spec)
    held_out = held_out_sets(config, spec)
    return ClipStore.of(config, folder, spec, clip_sets(config, spec), held_out=held_out)


def _share() -> Share:
    return Share(index=jax.process_index(), count=jax.process_count())


@contextmanager
def shards_bar(description: str, total: int) -> Iterator[Advance]:
    """Shows a progress bar of shards; every shard is also a heartbeat for the watchdog."""
    with steps_bar(description, total, unit="shard") as advance:

        def done() -> None:
            PROGRESS.heartbeat()
            advance()

        yield done


def _shards(held: ClipSet, plan: CachePlan) -> range:
    return shard_numbers(len(held.clips), plan.shard)


def _missing(held: ClipSet, plan: CachePlan) -> list[int]:
    numbers = _share().of(_shards(held, plan))
    return [number for number in numbers if not shard_file(held.cache, number).exists()]


def _never(*_: Any) -> Any:
    raise AssertionError("nothing is missing")


# That cached clips depend on; the last two if they hold tokens of an image.
MODELS = ("vae", "tokenizer", "image_encoder", "image_processor")


def model_hash(folder: ModelFolder, parts: Sequence[str] = MODELS[:2]) -> str:
    """Returns a digest of the components that cached clips depend on."""
    files = [file for name in parts for file in sorted((folder.root / name).glob("*"))]
    return digest_value([(file.name, file.sha256) for file in digest_files(files)])


def as_clip_batch(rows: Mapping[str, Any]) -> ClipBatch:
    """Returns a batch of cached clips, on the host."""
    captions: Captions | EncodedBefore
    if "text" in rows:
        captions = EncodedBefore(rows=rows["text"])
    else:
        captions = Captions(ids=rows["ids"], lengths=rows["lengths"])
    return ClipBatch(
        latents=rows[LATENTS],
        captions=captions,
        image=rows.get(IMAGE),
        image_tokens=rows.get(IMAGE_TOKENS),
    )

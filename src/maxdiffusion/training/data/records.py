"""Clips of a training from tfrecord files: encoded before, so that nothing is to be encoded here.

Records are listed once, in `latent_cache_dir`/records.jsonl. Latents of several sizes are trained
as buckets. WAN's texts have 512 rows; training attends to the zero rows after a caption as to one
row, so the last row must be zero: records without one are skipped, and listed in skipped.jsonl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import jax
import numpy as np

from maxdiffusion.checkpoints.diffusers_folder import ModelFolder
from maxdiffusion.config import Config
from maxdiffusion.config.validate import check_object_storage
from maxdiffusion.distributed.coordination import barrier
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.pipelines.text import PromptTokenizer
from maxdiffusion.runtime.files import (
    CacheKey,
    FilePath,
    add_new_json_lines,
    append_json_lines,
    as_path,
    read_json_lines,
    size_in_bytes,
)
from maxdiffusion.runtime.progress import steps_bar
from maxdiffusion.training.data.batches import Sample, Samples
from maxdiffusion.training.data.latent_cache import (
    EMPTY,
    SKIPPED,
    TEXT_MANIFEST,
    Shard,
    claim_cache,
    save_shard,
)
from maxdiffusion.training.data.store import model_hash
from maxdiffusion.training.data.tfrecord import LATENTS, TEXT, Record, list_records, read_clip
from maxdiffusion.training.image_conditioning import image_conditioning
from maxdiffusion.training.models import text_encoder
from maxdiffusion.training.text import padded_ids
from maxdiffusion.training.wan import Latent, StoredText

PATTERN, LIST = "*.tfrec*", "records.jsonl"
Located = tuple[FilePath, Record]


@dataclass(frozen=True, kw_only=True)
class RecordClips:
    """Samples of one latent size: latents, and text without its last row, which is zero."""

    records: tuple[Located, ...]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Sample:
        """Returns latents and text embeddings of one clip."""
        clip = read_clip(*self.records[index])
        return {"latents": clip[LATENTS], "text": clip[TEXT][:-1]}


def open_records(config: Config, folder: ModelFolder, spec: WanSpec) -> "RecordStore":
    """Returns the clips of the record files in train_data_dir, and of those in eval_data_dir.

    Raises ProblemsFound with every field that records cannot serve, and with records of other sizes
    than the model's.
    """
    check_records(config, spec)
    check_object_storage(train_data_dir=config.train_data_dir, eval_data_dir=config.eval_data_dir)
    notes = as_path(config.latent_cache_dir)
    trained = located(as_path(config.train_data_dir), notes, name="train_data_dir")
    held_out: list[Located] = []
    if config.eval_every > 0:
        held_out = located(as_path(config.eval_data_dir), notes, name="eval_data_dir")
    check_sizes([*trained, *held_out], config, spec)
    sets = [by_size(trained), by_size(held_out)]
    return RecordStore(
        config=config,
        folder=folder,
        spec=spec,
        sets=tuple(clips for held in sets for clips in held.values()),
        latents=[latent for held in sets for latent in held],
        trained=len(sets[0]),
    )


def check_records(config: Config, spec: WanSpec) -> None:
    """Raises ProblemsFound with everything that a training on records cannot do."""
    rules = {
        "train_data_dir": "" if config.train_data_dir else "must be the folder of .tfrec files",
        "train_text_encoder": "records hold embeddings of captions, not the captions"
        if config.train_text_encoder
        else "",
        "train_image_conditioning": "records hold no encoded first frames"
        if image_conditioning(config, spec).stores_image
        else "",
        "video_buckets": "records have their own sizes" if config.video_buckets else "",
    }
    values = vars(config)
    remedy = "Change it, or use dataset_type=videos with videos and captions"
    Collector(
        [
            Problem(name=name, value=values[name], rule=rule, remedy=remedy)
            for name, rule in rules.items()
            if rule
        ]
    ).raise_if_any()


def located(folder: FilePath, notes: FilePath, *, name: str) -> list[Located]:
    """Returns the usable records of all files of a folder, in their order; lists the others."""
    files: list[FilePath] = [*folder.glob(PATTERN)] if folder.is_dir() else []
    if not files:
        rule, remedy = f"holds no {PATTERN} file", "Name the folder of the record files"
        raise ProblemsFound([Problem(name=name, value=str(folder), rule=rule, remedy=remedy)])
    known = {(line["file"], line["bytes"]): line for line in read_json_lines(notes / LIST)}
    found: list[Located] = []
    with steps_bar("Listing records", len(files), unit="file") as advance:
        for file in sorted(files, key=str):
            line = known.get((str(file), size_in_bytes(file)))
            found += [(file, record) for record in _listed(file, line, notes)]
            advance()
    full = [(file, record) for file, record in found if record.full]
    if full and jax.process_index() == 0:
        reason = "its caption fills all rows of the text, and the last one must be zero"
        lines = [{"clip": f"{file}:{one.start}", "reason": reason} for file, one in full]
        add_new_json_lines(notes / SKIPPED, lines)
    return [(file, record) for file, record in found if not record.full]


def _listed(
    file: FilePath, line: Mapping[str, object] | None, notes: FilePath
) -> tuple[Record, ...]:
    """Returns the records of a file, from the list of an earlier run if it has them."""
    if line is not None:
        held: Sequence[Mapping[str, object]] = line["records"]  # type: ignore[assignment]
        return tuple(_as_record(one) for one in held)
    records = tuple(list_records(file))
    if jax.process_index() == 0:
        held = [asdict(record) for record in records]
        size = size_in_bytes(file)
        append_json_lines(notes / LIST, [{"file": str(file), "bytes": size, "records": held}])
    return records


def _as_record(held: Mapping[str, object]) -> Record:
    """Returns a record that JSON has held, with tuples in place of lists."""
    plain = {key: tuple(one) if isinstance(one, list) else one for key, one in held.items()}
    return Record(**plain)  # type: ignore[arg-type]


def check_sizes(records: Sequence[Located], config: Config, spec: WanSpec) -> None:
    """Raises ProblemsFound with every size that the model cannot be trained on."""
    channels, patch = spec.vae.z_dim, spec.transformer.patch
    text = (config.max_sequence_length, spec.text_encoder.width)
    sizes = {(record.latents, record.text): file for file, record in records}
    problems = []
    for (latents, rows), file in sizes.items():
        rule = ""
        if latents[0] != channels:
            rule = f"must be [{channels}, frames, rows, columns] for this model"
        elif any(size % step for size, step in zip(latents[1:], patch, strict=True)):
            rule = f"frames, rows and columns must be multiples of {patch}"
        if rule:
            problems.append(Problem(name=f"latents in {file}", value=latents, rule=rule))
        if rows != text:
            rule = f"must be {text}: max_sequence_length, and the width of the text encoder"
            problems.append(Problem(name=f"text in {file}", value=rows, rule=rule))
    Collector(problems).raise_if_any()


def by_size(records: Sequence[Located]) -> dict[Latent, RecordClips]:
    """Returns the records of every latent size: frames, rows, columns."""
    sizes = dict.fromkeys(record.latents[1:] for _, record in records)
    return {
        (size[0], size[1], size[2]): RecordClips(
            records=tuple(one for one in records if one[1].latents[1:] == size)
        )
        for size in sizes
    }


@dataclass(frozen=True, kw_only=True)
class RecordStore:
    """The records of a config by size: the first `trained` sets are trained on."""

    config: Config
    folder: ModelFolder
    spec: WanSpec
    sets: tuple[RecordClips, ...]
    latents: list[Latent]
    trained: int

    @property
    def caption_tokens(self) -> int:
        """Rows of a text, without the last one."""
        return self.config.max_sequence_length - 1

    @cached_property
    def empty_caption(self) -> tuple[int, ...]:
        """The tokens of the empty caption."""
        tokenizer = PromptTokenizer.load(self.folder.root / "tokenizer")
        return tokenizer.ids("", self.config.max_sequence_length)

    def describe(self) -> str:
        """Returns one line about the records."""
        clips = sum(map(len, self.sets[: self.trained]))
        sizes = " or ".join(map(str, dict.fromkeys(self.latents)))
        return f"{self.config.train_data_dir}: {clips} clips of latents {sizes}"

    def fill(self) -> None:
        """Encodes the empty caption, which records do not hold, if captions are dropped."""
        folder = as_path(self.config.latent_cache_dir)
        if self.config.caption_dropout and jax.process_index() == 0:
            model = model_hash(self.folder, ("text_encoder", "tokenizer"))
            claim_cache(folder / TEXT_MANIFEST, CacheKey({"text_encoder": model}))
            if not (folder / EMPTY).exists():
                save_shard(folder / EMPTY, {"text": self._encoded_empty()})
        barrier("the empty caption")

    def _encoded_empty(self) -> np.ndarray:
        ids = padded_ids([self.empty_caption], self.caption_tokens)
        count = np.array([len(self.empty_caption)], np.int32)
        return text_encoder(self.folder, self.spec)(ids, count)[0].astype(np.float32)

    def read(self) -> tuple[tuple[Samples, ...], StoredText]:
        """Returns the samples of every set, and the embedding of the empty caption."""
        if not self.config.caption_dropout:
            width = self.spec.text_encoder.width
            return self.sets, StoredText(empty=np.zeros((self.caption_tokens, width), np.float32))
        shard = Shard(as_path(self.config.latent_cache_dir) / EMPTY)
        return self.sets, StoredText(empty=shard.whole("text"))

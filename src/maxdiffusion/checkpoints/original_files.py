"""Transformer files outside a diffusers folder: Wan-AI's layout, and single community files.

    location --find_transformers--> path by expert --open_transformer--> tensors by diffusers' names
    folder --with_transformers--> the folder with those weights, every difference reported

A location is a file, a folder, or a place on the hub (`owner/model`, `owner/model/folder`,
`owner/model/file.safetensors`). The tensors decide how a file is read, never its own name:

* original or diffusers names, with or without `model.diffusion_model.` / `diffusion_model.`
* 8-bit weights with scales (`scale_weight`, `weight_scale`): multiplied while they are read
* parts of an all-in-one file that are not the transformer are left alone
* tensors that hold several of diffusers' ones (Animate) are cut into their rows
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from flax import nnx

from maxdiffusion.checkpoints.diffusers_folder import HUB_ID, ModelFolder, download
from maxdiffusion.checkpoints.load import match_parameters
from maxdiffusion.checkpoints.safetensors_io import (
    FLOAT_DTYPES,
    INDEX_SUFFIX,
    SHARD,
    Box,
    FileReader,
    StoredTensor,
    StoredWeights,
    TensorPatch,
    TensorReader,
    item_size,
    open_file,
    open_weights,
    whole,
)
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.models.checkpoint_map import CheckpointMap
from maxdiffusion.models.wan.original import (
    Piece,
    TensorSizes,
    fixed_values,
    original_name,
    pieces_of,
)

Shape = tuple[int, ...]
Pieces = Callable[[str, Shape], tuple[Piece, ...]]
FIRST_FIELD = "wan_transformer_pretrained_model_name_or_path"
SECOND_FIELD = "wan_transformer_2_pretrained_model_name_or_path"
# Folders of the experts of one model, high noise first: Wan-AI's and diffusers'.
EXPERT_FOLDERS = (("high_noise_model", "low_noise_model"), ("transformer", "transformer_2"))
HUB_PLACE = re.compile(rf"(?P<repository>{HUB_ID})(?:/(?P<inside>[\w./-]+))?")
# Downloaded of a hub id without a file or folder; other repositories hold several models.
HUB_PATTERNS = (
    "config.json",
    "diffusion_pytorch_model*",
    *(f"{folder}/*" for pair in EXPERT_FOLDERS for folder in pair),
)


def _none_fixed(name: str) -> np.ndarray | None:
    del name
    return None


@dataclass(frozen=True, kw_only=True)
class NameDialects:
    """Both spellings of a model's tensors.

    `pieces` returns diffusers' tensors inside an original one, none for an unknown name.
    `to_original` returns the original tensor that holds one of diffusers', or None. `fixed` returns
    the values of an original tensor that diffusers' model does not have, or None.
    """

    pieces: Pieces
    to_original: Callable[[str], str | None]
    fixed: Callable[[str], np.ndarray | None] = _none_fixed


WAN_NAMES = NameDialects(pieces=pieces_of, to_original=original_name, fixed=fixed_values)


def with_transformers(
    folder: ModelFolder, paths: Mapping[str, Path], table: CheckpointMap, abstract: nnx.State
) -> ModelFolder:
    """Returns a folder of WAN with the transformers at these paths, by component.

    The sizes that their tensors reveal are checked against the folder's config, and every tensor
    against the model. Raises all differences at once, before anything is read.
    """
    problems = Collector()
    opened: dict[str, StoredWeights] = {}
    for name, path in paths.items():
        with problems:
            stored = opened[name] = open_transformer(path, WAN_NAMES)
            with problems:
                Collector(_size_problems(stored, folder, name)).raise_if_any()
            match_parameters(stored, table, abstract)
    problems.raise_if_any()
    return replace(folder, weights={**folder.weights, **opened})


def _size_problems(stored: StoredWeights, folder: ModelFolder, name: str) -> list[Problem]:
    """Returns a problem for each size that differs from the config of the component `name`."""
    sizes = TensorSizes.of({tensor: stored.tensors[tensor].shape for tensor in stored.tensors})
    config = folder.path(name, "config.json")
    remedy = "Set pretrained_model_name_or_path to a folder of that model, or take other files"
    return [
        Problem(
            name=f"{stored.folder.name}: {key}",
            value=here,
            rule=f"is {there} in {config}; the tensors are those of {sizes.kind}",
            remedy=remedy,
        )
        for key, (here, there) in sizes.differences(folder.configs[name]).items()
    ]


def find_transformers(
    first: str, second: str, experts: Sequence[str], *, base: Path
) -> dict[str, Path]:
    """Returns the file or folder of every expert.

    `first` and `second` are the values of the two fields. With one expert only `first` is set. With
    two, `first` is a folder that holds both, or each field names one of them. `base` is the folder
    of the model that they replace, for remedies.
    """
    if len(experts) == 1:
        if second:
            rule = f"this model has one transformer, which {FIRST_FIELD} names"
            raise ProblemsFound([_problem(SECOND_FIELD, second, rule, "Leave it empty")])
        return {experts[0]: _one(FIRST_FIELD, first)}
    if first and second:
        return dict(
            zip(experts, (_one(FIRST_FIELD, first), _one(SECOND_FIELD, second)), strict=True)
        )
    given, missing, kept = FIRST_FIELD, SECOND_FIELD, experts[1]
    if not first:
        given, missing, kept = SECOND_FIELD, FIRST_FIELD, experts[0]
    root = _locate(given, first or second)
    pair = _experts_in(root)
    if pair is None or not first:
        rule = "names one transformer, and this model has two experts"
        remedy = f"Name the other one in {missing} (the present one: {base / kept})"
        raise ProblemsFound([_problem(given, first or second, rule, remedy)])
    return dict(zip(experts, pair, strict=True))


def _one(name: str, location: str) -> Path:
    """Returns the file or folder of one transformer."""
    path = _locate(name, location)
    pair = _experts_in(path)
    if pair is not None:
        rule = f"holds two experts, {pair[0].name} and {pair[1].name}, where one is needed"
        raise ProblemsFound([_problem(name, location, rule, "Name one of these folders")])
    inner = path / "transformer"
    return inner if inner.is_dir() and not any(path.glob("*.safetensors")) else path


def _experts_in(path: Path) -> tuple[Path, Path] | None:
    for names in EXPERT_FOLDERS:
        first, second = (path / name for name in names)
        if first.is_dir() and second.is_dir():
            return first, second
    return None


def _locate(name: str, location: str) -> Path:
    """Returns the local path of a location; downloads what is on the hub."""
    path = Path(location).expanduser()
    if os.path.exists(path):
        return path
    place = HUB_PLACE.fullmatch(location)
    if place is None:
        rule = "is not a .safetensors file, a folder or a place on the hub"
        remedy = "Give a path, owner/model, or owner/model/file.safetensors"
        raise ProblemsFound([_problem(name, location, rule, remedy)])
    repository, inside = place["repository"], place["inside"]
    patterns = (inside, f"{inside}/*") if inside else HUB_PATTERNS
    found = download(repository, patterns, name=name) / (inside or "")
    if not found.exists() or (found.is_dir() and not any(found.rglob("*.safetensors"))):
        rule = "has no transformer there in Wan-AI's or diffusers' layout"
        remedy = f"Name the file: {repository}/FILE.safetensors"
        raise ProblemsFound([_problem(name, location, rule, remedy)])
    return found


def open_transformer(path: Path, names: NameDialects) -> StoredWeights:
    """Returns the tensors of a file or folder by diffusers' names; reads headers and scales.

    Tensors that no name is known for keep their own, so that a strict load lists them.
    """
    if path.is_file() and path.suffix != ".safetensors":
        rule = "is not a .safetensors file (others run code of their author when they are read)"
        remedy = "Convert it to safetensors first"
        raise ProblemsFound([_problem("weights file", str(path), rule, remedy)])
    if path.is_dir():
        _refuse_several_models(path)
    stored = open_file(path) if path.is_file() else open_weights(path)
    prefix = _prefix(stored)
    tensors = {
        name.removeprefix(prefix): tensor
        for name, tensor in stored.tensors.items()
        if name.startswith(prefix) or not _is_other_part(name, prefix)
    }
    tensors = _without_fixed(tensors, names)
    pieces, written = _dialect(stored, prefix, tensors, names)
    found = _without_scales(stored, tensors)
    return _translated(stored, found, pieces=pieces, written=written)


def _refuse_several_models(folder: Path) -> None:
    """Raises if a folder has several files that are neither indexed nor numbered shards."""
    files = sorted(folder.glob("*.safetensors"))
    single = [file.name for file in files if not SHARD.fullmatch(file.name)]
    usual = (folder / "diffusion_pytorch_model.safetensors").is_file()
    if len(single) > 1 and not usual and not any(folder.glob(f"*{INDEX_SUFFIX}")):
        rule = f"holds {len(single)} models: {', '.join(single)}"
        raise ProblemsFound([_problem("weights", str(folder), rule, "Name one of these files")])


PREFIXES = ("model.diffusion_model.", "diffusion_model.")


def _prefix(stored: StoredWeights) -> str:
    """Returns the prefix of the transformer's tensors."""
    for prefix in PREFIXES:
        if any(name.startswith(prefix) for name in stored.tensors):
            return prefix
    return ""


# The other parts of an all-in-one file, which come with `model.diffusion_model.` only.
OTHER_PARTS = ("text_encoders.", "cond_stage_model.", "vae.", "first_stage_model.", "clip_vision.")


def _is_other_part(name: str, prefix: str) -> bool:
    return prefix == PREFIXES[0] and name.startswith(OTHER_PARTS)


def _without_fixed(
    tensors: Mapping[str, StoredTensor], names: NameDialects
) -> dict[str, StoredTensor]:
    """Returns the tensors without fixed ones. Raises if one of these has other values."""
    problems: list[Problem] = []
    kept: dict[str, StoredTensor] = {}
    with FileReader() as reader:
        for name, tensor in tensors.items():
            wanted = names.fixed(name)
            if wanted is None:
                kept[name] = tensor
            elif not _holds(tensor, wanted, reader):
                rule = "must be that of the released model, which is not read from files"
                value = f"{tensor.dtype}{list(tensor.shape)}"
                label = f"{tensor.file.name}: {tensor.name}"
                problems.append(_problem(label, value, rule, "Use another file"))
    Collector(problems).raise_if_any()
    return kept


def _holds(tensor: StoredTensor, wanted: np.ndarray, reader: TensorReader) -> bool:
    """Returns whether a tensor is `wanted`, rounded to the dtype of the tensor."""
    if tensor.shape != wanted.shape or tensor.dtype not in FLOAT_DTYPES:
        return False
    found = reader.read(tensor, whole(tensor.shape))
    return bool(np.array_equal(found, wanted.astype(found.dtype)))


def _dialect(
    stored: StoredWeights,
    prefix: str,
    tensors: Mapping[str, StoredTensor],
    names: NameDialects,
) -> tuple[Pieces, Callable[[str], str]]:
    """Returns the function to diffusers' tensors, and the one to names as the file spells them."""
    original = sum(bool(names.pieces(name, one.shape)) for name, one in tensors.items())
    diffusers = sum(names.to_original(name) is not None for name in tensors)
    if not original and not diffusers:
        some = ", ".join(sorted(tensors)[:3]) or "none"
        rule = f"is not a WAN transformer: no tensor has a known name (its first: {some})"
        remedy = "Name a file with original or diffusers names"
        raise ProblemsFound([_problem("weights", str(stored.folder), rule, remedy)])
    if original >= diffusers:
        return names.pieces, lambda name: prefix + (names.to_original(name) or name)
    return _whole_tensor, lambda name: prefix + name


def _whole_tensor(name: str, shape: Shape) -> tuple[Piece, ...]:
    return (Piece(name=name, shape=shape),)


@dataclass(frozen=True, kw_only=True)
class _Tensors:
    """The tensors of a model by the file's names, and the scale of each that has one."""

    tensors: Mapping[str, StoredTensor]
    scales: Mapping[str, StoredTensor]


MARKER = "scaled_fp8"
WEIGHT_SCALES = (".scale_weight", ".weight_scale")
INPUT_SCALES = (".scale_input", ".input_scale")  # of activations, which stay unquantised here


def _without_scales(stored: StoredWeights, tensors: Mapping[str, StoredTensor]) -> _Tensors:
    """Returns tensors and scales apart. Raises if an 8-bit tensor of a scaled file has no scale."""
    weights: dict[str, StoredTensor] = {}
    scales: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        kind = next((end for end in (*WEIGHT_SCALES, *INPUT_SCALES) if name.endswith(end)), "")
        scaled = f"{name.removesuffix(kind)}.weight"
        if kind in WEIGHT_SCALES and scaled in tensors:
            scales[scaled] = tensor
        elif name != MARKER and not (kind in INPUT_SCALES and scaled in tensors):
            weights[name] = tensor
    if MARKER in tensors:
        bare = [
            _problem(
                f"{stored.folder.name}: {name}",
                tensor.dtype,
                f"has no scale_weight, and the file says {MARKER}",
                "Download the file again",
            )
            for name, tensor in weights.items()
            if tensor.dtype.startswith("F8") and name not in scales
        ]
        Collector(bare).raise_if_any()
    return _Tensors(tensors=weights, scales=scales)


def _translated(
    stored: StoredWeights, found: _Tensors, *, pieces: Pieces, written: Callable[[str], str]
) -> StoredWeights:
    """Returns the weights under diffusers' names, with a patch for every scale."""
    tensors: dict[str, StoredTensor] = {}
    patches: dict[str, tuple[TensorPatch, ...]] = {}
    problems = Collector()
    with FileReader() as reader:
        for name, tensor in found.tensors.items():
            scale = None
            with problems:
                if name in found.scales:
                    scale = _dequantize(tensor, found.scales[name], reader)
            row = 0
            for part in pieces(name, tensor.shape) or _whole_tensor(name, tensor.shape):
                if part.name in tensors:
                    rule, remedy = f"is {part.name}, which the file also holds", "Keep one of them"
                    problems.problems.append(_problem("tensor", tensor.name, rule, remedy))
                tensors[part.name] = _cut(tensor, part.shape, row)
                if scale is not None:
                    patches[part.name] = (scale.of_rows(row, row + part.shape[0]),)
                row += part.shape[0] if part.shape else 0
    problems.raise_if_any()
    names = {name: tensor.name for name, tensor in tensors.items()}
    return replace(
        stored,
        tensors=tensors,
        patches=patches,
        written=lambda name: names.get(name) or written(name),
    )


def _cut(tensor: StoredTensor, shape: Shape, row: int) -> StoredTensor:
    """Returns the part of a tensor from a row on, with another shape; rows are contiguous."""
    if shape == tensor.shape:
        return tensor
    width = item_size(tensor.dtype) or 0  # a dtype without a size is refused before it is read
    start = tensor.start + row * math.prod(tensor.shape[1:]) * width
    return replace(tensor, shape=shape, start=start, stop=start + math.prod(shape) * width)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dequantize(TensorPatch):
    """Multiplies a tensor by its scale: one number, or one for each row."""

    scale: np.ndarray  # [1] or [rows], float32

    def of_rows(self, start: int, stop: int) -> "Dequantize":
        """Returns the patch of some of the rows."""
        return self if len(self.scale) == 1 else Dequantize(scale=self.scale[start:stop])

    def apply(self, values: np.ndarray, box: Box, reader: TensorReader) -> np.ndarray:
        del reader
        rows = self.scale if len(self.scale) == 1 else self.scale[slice(*box[0])]
        values *= rows.reshape(-1, *(1 for _ in values.shape[1:]))
        return values


def _dequantize(tensor: StoredTensor, scale: StoredTensor, reader: TensorReader) -> Dequantize:
    """Returns the patch of a scaled tensor. Raises unless the scale fits and is positive."""
    rows = tensor.shape[:1]
    if scale.dtype not in FLOAT_DTYPES:
        raise ProblemsFound([_bad_scale(scale, scale.dtype, "must be a float")])
    if _squeezed(scale.shape) not in ((), *_nonunit(rows)):
        rule = f"must be one number, or one for each of the {rows[0]} rows of its weight"
        raise ProblemsFound([_bad_scale(scale, list(scale.shape), rule)])
    values = reader.read(scale, whole(scale.shape)).astype(np.float32).reshape(-1)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ProblemsFound([_bad_scale(scale, float(values.min()), "must be finite and above 0")])
    return Dequantize(scale=values)


def _squeezed(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _nonunit(rows: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    return (rows,) if rows and rows[0] != 1 else ()


def _bad_scale(scale: StoredTensor, value: object, rule: str) -> Problem:
    return _problem(f"{scale.file.name}: {scale.name}", value, rule, "Use another file")


def _problem(name: str, value: object, rule: str, remedy: str) -> Problem:
    return Problem(name=name, value=value, rule=rule, remedy=remedy)

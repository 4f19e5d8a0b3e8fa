"""LoRA files in every dialect, matched to the tensors of a model and fused while those stream in.

    file --read_lora--> LoraFile: a change of each tensor, and what could not be matched
    StoredWeights --fuse--> StoredWeights whose tensors are changed as they are read

    W += s (alpha / rank) up @ down + s diff            b += s diff_b

in float32, on the part of a tensor that is being read, before it is rearranged and cast. Factors
are read with the part that they change: no process holds more of a file than that.

| dialect | keys of a module |
|---|---|
| diffusers, PEFT | `transformer.M.lora_A.weight`, `base_model.model.M.lora_A.weight`, `.lora_B` |
| original, lightx2v | `diffusion_model.M.lora_down.weight`, `.lora_up`, `.alpha`, `.diff`, ... |
| kohya, musubi | `lora_unet_M.lora_down.weight` with underscores in M |
| DiffSynth, bare | `M.lora_A.default.weight`, `M.lora_down.weight` |

M is a module by its original or its diffusers name; all combinations are read.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from maxdiffusion.checkpoints.safetensors_io import (
    FLOAT_DTYPES,
    Box,
    FileReader,
    StoredTensor,
    StoredWeights,
    TensorPatch,
    TensorReader,
    read_header,
    read_metadata,
    whole,
)
from maxdiffusion.errors import Problem, ProblemsFound

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LowRank(TensorPatch):
    """Adds strength x up @ down. Convolutions have further dimensions, of size one in `up`."""

    down: StoredTensor  # [rank, in, ...]
    up: StoredTensor  # [out, rank, ...]
    strength: float

    @property
    def rank(self) -> int:
        """The number of rows of `down`."""
        return self.down.shape[0]

    def apply(self, values: np.ndarray, box: Box, reader: TensorReader) -> np.ndarray:
        down_box = ((0, self.rank), *box[1:])
        down = reader.read(self.down, down_box).astype(np.float32).reshape(self.rank, -1)
        up_box = (box[0], *whole(self.up.shape[1:]))
        up = reader.read(self.up, up_box).astype(np.float32).reshape(-1, self.rank)
        up *= np.float32(self.strength)
        values += (up @ down).reshape(values.shape)
        return values


@dataclass(frozen=True, kw_only=True)
class Difference(TensorPatch):
    """Adds strength x a tensor of the same shape."""

    tensor: StoredTensor
    strength: float = 1.0

    def apply(self, values: np.ndarray, box: Box, reader: TensorReader) -> np.ndarray:
        values += reader.read(self.tensor, box).astype(np.float32) * np.float32(self.strength)
        return values


Change = LowRank | Difference


@dataclass(frozen=True, kw_only=True)
class Unmatched:
    """A tensor of a LoRA file that changes nothing in the model, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """A LoRA file for one model: changes of tensors by diffusers' names, at strength 1."""

    file: Path
    changes: Mapping[str, tuple[Change, ...]] = field(repr=False)
    unmatched: tuple[Unmatched, ...] = ()
    notes: tuple[str, ...] = ()
    settings_files: tuple[Path, ...] = ()  # other files that its alphas come from

    def scaled(self, strength: float) -> dict[str, tuple[Change, ...]]:
        """Returns the changes at a strength, which scales pairs and differences alike."""
        return {
            name: tuple(replace(one, strength=one.strength * strength) for one in changes)
            for name, changes in self.changes.items()
        }

    def describe(self) -> str:
        """Returns the report: what was matched, at which ranks, and what was not."""
        every = [one for changes in self.changes.values() for one in changes]
        ranks = Counter(one.rank for one in every if isinstance(one, LowRank))
        parts = [f"{count} pairs of rank {rank}" for rank, count in sorted(ranks.items())]
        differences = len(every) - sum(ranks.values())
        parts += [f"{differences} differences"] if differences else []
        lines = [f"{self.file.name}: {', '.join(parts)}; {len(self.changes)} tensors change"]
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  not applied: {one.name} ({one.reason})" for one in self.unmatched]
        return "\n".join(lines)

    def check(self, *, strict: bool) -> None:
        """Raises if nothing was matched or, where `strict`, if anything was not."""
        if not self.changes:
            some = ", ".join(one.name for one in self.unmatched[:3]) or "none"
            rule = f"changes nothing in this model: no tensor was matched (its first: {some})"
            remedy = "Use an adapter for WAN of this size"
            raise ProblemsFound([_problem("LoRA file", str(self.file), rule, remedy)])
        if strict and self.unmatched:
            remedy = "Use an adapter for this model, or set lora_strict: false to leave it out"
            raise ProblemsFound(
                [
                    _problem(f"{self.file.name}: {one.name}", "unmatched", one.reason, remedy)
                    for one in self.unmatched
                ]
            )


def _problem(name: str, value: object, rule: str, remedy: str) -> Problem:
    return Problem(name=name, value=value, rule=rule, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class LoraTargets:
    """The tensors of a model that adapters may change, and every spelling of their modules."""

    shapes: Mapping[str, Shape]  # by diffusers' names
    modules: Mapping[str, str]  # spelling -> diffusers' name

    @classmethod
    def of(
        cls, shapes: Mapping[str, Shape], to_original: Callable[[str], str | None]
    ) -> "LoraTargets":
        """Returns the targets; `to_original` translates diffusers' module names."""
        modules: dict[str, str] = {}
        for name in shapes:
            module = name.removesuffix(".weight").removesuffix(".bias")
            for spelling in (module, to_original(module) or module):
                for written in (spelling, spelling.replace(".", "_")):
                    assert modules.setdefault(written, module) == module, (written, module)
        return cls(shapes=shapes, modules=modules)

    def module(self, spelling: str) -> str | None:
        """Returns diffusers' name of a module, or None if the model has none of this name."""
        return self.modules.get(spelling)

    def weight(self, module: str) -> str:
        """Returns the name of a module's weight; tables are parameters themselves."""
        return module if module in self.shapes else f"{module}.weight"


PREFIXES = re.compile(
    r"(?:base_model\.model\.|model\.diffusion_model\.|diffusion_model\.|transformer\.|pipe\.dit\.)*"
    r"(?:lora_(?:unet|transformer)_+)?"
)
PART = re.compile(
    r"(?P<module>.+?)(?:"
    r"\.lora_(?P<factor>A|B|down|up)(?:\.[A-Za-z_][\w-]*)??\.(?P<kind>weight|bias)"
    r"|[._]lora\.(?P<plain>down|up)\.weight"
    r"|\.(?P<leaf>alpha|diff_b|diff_m|diff)"
    r")"
)
ROLES = {"A": "down", "B": "up", "down": "down", "up": "up"}
UNSUPPORTED = {
    "dora_scale": "DoRA is not supported",
    "lora_magnitude_vector": "DoRA is not supported",
    "hada_": "LoHa is not supported",
    "lokr_": "LoKr is not supported",
    "lora_mid": "a third factor is not supported",
}


def read_lora(file: Path, targets: LoraTargets) -> LoraFile:
    """Returns a LoRA file matched to the tensors of a model; reads its header and alphas."""
    modules, unmatched = _by_module(file, targets)
    settings, notes, settings_files = _settings(file)
    changes: dict[str, tuple[Change, ...]] = {}
    with FileReader() as reader:
        for module, parts in modules.items():
            try:
                found = _changes(module, parts, targets, reader=reader, settings=settings)
            except _NotAppliedError as error:
                unmatched += [Unmatched(name=one.name, reason=str(error)) for one in parts.values()]
                continue
            for name, change in found:
                changes[name] = (*changes.get(name, ()), change)
    return LoraFile(
        file=file,
        changes=changes,
        unmatched=tuple(unmatched),
        notes=notes,
        settings_files=settings_files,
    )


class _NotAppliedError(Exception):
    """Says why the tensors of a module are not applied."""


Parts = dict[str, StoredTensor]  # down, up, up_bias, alpha, diff, diff_b


def _by_module(file: Path, targets: LoraTargets) -> tuple[dict[str, Parts], list[Unmatched]]:
    """Returns the tensors of each module by their role, and those that have none."""
    modules: dict[str, Parts] = {}
    unmatched: list[Unmatched] = []
    for tensor in read_header(file):
        try:
            module, role = _role(tensor, targets)
            if role in modules.get(module, {}):
                other = modules[module][role].name
                raise _NotAppliedError(f"{other} has the same meaning")
        except _NotAppliedError as error:
            unmatched.append(Unmatched(name=tensor.name, reason=str(error)))
        else:
            modules.setdefault(module, {})[role] = tensor
    return modules, unmatched


def _role(tensor: StoredTensor, targets: LoraTargets) -> tuple[str, str]:
    """Returns the module that a tensor belongs to, and its role there."""
    start = PREFIXES.match(tensor.name)
    name = tensor.name[start.end() if start else 0 :]
    for mark, reason in UNSUPPORTED.items():
        if mark in name:
            raise _NotAppliedError(reason)
    found = PART.fullmatch(name)
    if found is None:
        raise _NotAppliedError("is not a part of a LoRA that is known here")
    spelling = f"{found['module']}.modulation" if found["leaf"] == "diff_m" else found["module"]
    module = targets.module(spelling)
    if module is None:
        raise _NotAppliedError(f"the model has no {spelling}")
    if tensor.dtype not in FLOAT_DTYPES:
        raise _NotAppliedError(f"its values are {tensor.dtype}, and must be floats")
    if found["leaf"]:
        return module, found["leaf"].replace("diff_m", "diff")
    role = ROLES[found["factor"] or found["plain"]]
    if found["kind"] == "bias":
        if role == "down":
            raise _NotAppliedError("a bias of the first factor is not supported")
        return module, "up_bias"
    return module, role


def _changes(
    module: str,
    parts: Parts,
    targets: LoraTargets,
    *,
    reader: TensorReader,
    settings: "AdapterSettings",
) -> Iterator[tuple[str, Change]]:
    """Yields the change of each tensor of a module. Raises before the first if one cannot be."""
    found: list[tuple[str, Change]] = []
    scale = 1.0
    if {"down", "up"} & set(parts):
        pair = _pair(parts)
        scale = settings.scale(module, pair.rank, _number(parts.get("alpha"), reader))
        found.append((targets.weight(module), replace(pair, strength=scale)))
    elif {"alpha", "up_bias"} & set(parts):
        raise _NotAppliedError("its module has no pair of factors")
    for role, tensor, strength in (
        ("diff", targets.weight(module), 1.0),
        ("diff_b", f"{module}.bias", 1.0),
        ("up_bias", f"{module}.bias", scale),
    ):
        if role in parts:
            found.append((tensor, Difference(tensor=parts[role], strength=strength)))
    for name, change in found:
        _check_shape(name, change, targets)
    return iter(found)


def _pair(parts: Parts) -> LowRank:
    if not {"down", "up"} <= set(parts):
        raise _NotAppliedError("its module has only one of the two factors")
    return LowRank(down=parts["down"], up=parts["up"], strength=1.0)


def _number(tensor: StoredTensor | None, reader: TensorReader) -> float | None:
    """Returns the value of an alpha, or None without one."""
    if tensor is None:
        return None
    if math.prod(tensor.shape) != 1:
        raise _NotAppliedError(f"its alpha has shape {list(tensor.shape)}, and must be a number")
    value = float(reader.read(tensor, whole(tensor.shape)).reshape(-1)[0])
    if not math.isfinite(value):
        raise _NotAppliedError(f"its alpha is {value}")
    return value


def _check_shape(name: str, change: Change, targets: LoraTargets) -> None:
    """Raises unless a change has the shape of the tensor that it is added to."""
    wanted = targets.shapes.get(name)
    if wanted is None:
        raise _NotAppliedError(f"the model has no {name}")
    if isinstance(change, Difference):
        shape: Shape = change.tensor.shape
    else:
        down, up = change.down.shape, change.up.shape
        fits = len(up) >= 2 and up[1] == down[0] and math.prod(up) == up[0] * up[1]
        if not fits:
            raise _NotAppliedError(f"its factors {list(down)} and {list(up)} have no product")
        shape = (up[0], *down[1:])
    if shape != wanted:
        raise _NotAppliedError(f"its shape is {list(shape)}, that of {name} is {list(wanted)}")


METADATA = "lora_adapter_metadata"  # diffusers' entry in the header of a file
PEFT_CONFIG = "adapter_config.json"


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """PEFT's settings of an adapter, which give the alphas that tensors do not."""

    alpha: float | None = None  # None: equal to the rank
    patterns: Mapping[str, float] = field(default_factory=dict)  # end of a module's name -> alpha
    rank_stabilized: bool = False

    def scale(self, module: str, rank: int, own: float | None) -> float:
        """Returns alpha / rank of a module; `own` is the alpha that the file stores for it."""
        alpha = own if own is not None else self._alpha(module)
        if alpha is None:
            return 1.0
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def _alpha(self, module: str) -> float | None:
        for pattern, alpha in self.patterns.items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return alpha
        return self.alpha


def _settings(file: Path) -> tuple[AdapterSettings, tuple[str, ...], tuple[Path, ...]]:
    """Returns the settings in the header or next to the file, a line about it, and other files."""
    text = read_metadata(file).get(METADATA)
    if text is not None:
        values = _json(file, text)
        inner = {key.partition(".")[2] or key: value for key, value in values.items()}
        return _parsed(file, inner), ("alpha from the header of the file",), ()
    config = file.parent / PEFT_CONFIG
    if config.is_file():
        found = _parsed(config, _json(config, config.read_text()))
        return found, (f"alpha from {PEFT_CONFIG}",), (config,)
    return AdapterSettings(), (), ()


def _json(file: Path, text: str) -> Mapping[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        rule = f"has adapter settings that are not JSON ({error})"
        raise ProblemsFound([_problem("LoRA file", str(file), rule, "Save it again")]) from error
    return values if isinstance(values, dict) else {}


def _parsed(file: Path, values: Mapping[str, Any]) -> AdapterSettings:
    if values.get("use_dora"):
        remedy = "Use an adapter without it"
        raise ProblemsFound([_problem("LoRA file", str(file), "DoRA is not supported", remedy)])
    alpha = values.get("lora_alpha")
    return AdapterSettings(
        alpha=None if alpha is None else float(alpha),
        patterns={key: float(one) for key, one in (values.get("alpha_pattern") or {}).items()},
        rank_stabilized=bool(values.get("use_rslora")),
    )


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA file and the strength at which it is applied.

    With `low_rank` its pairs stay factors where the model has room for them (`lora_update`).
    """

    lora: LoraFile
    strength: float
    low_rank: bool = False


def fuse(stored: StoredWeights, adapters: Sequence[Adapter]) -> StoredWeights:
    """Returns weights to which the adapters are added while they are read, one after the other."""
    patches = dict(stored.patches)
    for adapter in adapters:
        for name, changes in adapter.lora.scaled(adapter.strength).items():
            patches[name] = (*patches.get(name, ()), *changes)
    return replace(
        stored,
        patches=patches,
        patch_files=(*stored.patch_files, *(file for file, _ in _uses(adapters))),
        patch_notes=(*stored.patch_notes, *(note for _, note in _uses(adapters))),
    )


def _uses(adapters: Iterable[Adapter]) -> Iterator[tuple[Path, str]]:
    """Yields every file that adapters read, and how its values are used."""
    for adapter in adapters:
        name, tensors = adapter.lora.file.name, len(adapter.lora.changes)
        yield adapter.lora.file, f"{name} at {adapter.strength!r}, {tensors} tensors"
        for file in adapter.lora.settings_files:
            yield file, f"alpha of {name}"

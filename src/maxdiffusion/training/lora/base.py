"""The weights that adapters are trained on, the files that adapters start from and end in.

model folder --frozen_values--> weights, frozen        --base_identity--> notes of checkpoints
train_lora_from --starting_files--> matched files --initial_adapters--> TrainState
TrainState --export_adapters--> export_dir/pytorch_lora_weights.safetensors
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from maxdiffusion.checkpoints.diffusers_folder import ModelFolder, component_digests
from maxdiffusion.checkpoints.load import ComponentSource, load_parameters, source_shapes
from maxdiffusion.checkpoints.lora import Adapter, LoraFile, LoraTargets, LowRank, read_lora
from maxdiffusion.checkpoints.lora_export import AdapterTensors
from maxdiffusion.checkpoints.lora_update import AdaptedTransformer, with_rooms, without_rooms
from maxdiffusion.config import Config
from maxdiffusion.distributed.coordination import barrier
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.models.abstract import Values, values_of
from maxdiffusion.models.umt5.checkpoint import umt5_map
from maxdiffusion.models.wan.checkpoint import transformer_map
from maxdiffusion.models.wan.original import original_module
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.pipelines.weights import find_lora
from maxdiffusion.runtime.files import as_path, replacing, writing
from maxdiffusion.training.lora.adapters import LoraSettings
from maxdiffusion.training.loss import HIGH_NOISE, LOW_NOISE
from maxdiffusion.training.models import loaded
from maxdiffusion.training.step import TrainState, first_state_of_each
from maxdiffusion.training.text import TEXT_ENCODER
from maxdiffusion.training.wan import WanTraining

logger = logging.getLogger(__name__)
FIELD = "train_lora_from"
ADAPTER_FILES = {
    HIGH_NOISE: "pytorch_lora_weights.safetensors",
    LOW_NOISE: "pytorch_lora_weights_2.safetensors",
}
FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class AdapterRun:
    """A training of adapters: its model folder, its training, and the files to start from."""

    config: Config
    folder: ModelFolder
    spec: WanSpec
    training: WanTraining

    @property
    def lora(self) -> LoraSettings:
        """The adapters."""
        assert self.training.lora is not None
        return self.training.lora

    def source(self, name: str) -> ComponentSource:
        """Returns the stored weights of a transformer."""
        return ComponentSource(
            stored=self.folder.weights[name],
            table=transformer_map(self.spec.transformer),
            abstract=without_rooms(self.training.models[name].parameters),
        )

    def frozen_values(self) -> dict[str, Values]:
        """Returns the weights of all models of the run, in the dtypes that they are kept in."""
        mesh, models = self.training.mesh, self.training.models
        values = {
            name: values_of(load_parameters(self.source(name), mesh=mesh)[0])
            for name in self.training.experts.names
        }
        if TEXT_ENCODER in models:
            table, model = umt5_map(self.spec.text_encoder), models[TEXT_ENCODER]
            values[TEXT_ENCODER] = loaded(self.folder, TEXT_ENCODER, model, table, mesh)
        return values

    def starting_files(self) -> dict[str, LoraFile]:
        """Returns the file that each transformer starts from; raises if one does not fit."""
        if not self.config.train_lora_from:
            return {}
        problems, found = Collector(), {}
        for name in self.training.experts.names:
            with problems:
                file = find_adapter(self.config.train_lora_from, name, self.training.experts.names)
                found[name] = self._read(file, self.source(name))
        problems.raise_if_any()
        return found

    def _read(self, file: Path, source: ComponentSource) -> LoraFile:
        """Returns a file with one pair of the run's rank for every adapter, and nothing else."""
        shapes = source_shapes(source.table, source.abstract)
        found = read_lora(file, LoraTargets.of(shapes, original_module))
        found.check(strict=True)
        entries = self.lora.entries(source.table)
        wanted = [name for entry in entries for name in source.table.sources(entry)]
        check_start(found, wanted, self.lora)
        return found

    def initial_state(self, files: Mapping[str, LoraFile]) -> TrainState:
        """Returns the state before the first step: adapters of these files, or new ones."""
        config, training = self.config, self.training
        values = {}
        for offset, name in enumerate(training.experts.names):
            model, seed = training.models[name], config.seed + offset
            if name in files:
                values[name] = self._started(name, files[name])
            else:
                values[name] = self.lora.first_values(model, seed=seed, mesh=training.mesh)
        return first_state_of_each(
            values.items(),
            training.optimiser,
            seed=config.seed,
            mesh=training.mesh,
            placement=training.placement,
        )

    def _started(self, name: str, file: LoraFile) -> Values:
        """Returns the adapters of a file; B carries what differs from the scale of this run."""
        logger.info("LoRA %s starts from %s", name, file.describe())
        changes = {
            tensor: tuple(replace(one, strength=one.strength / self.lora.scale) for one in pairs)
            for tensor, pairs in file.changes.items()
        }
        adapter = Adapter(lora=replace(file, changes=changes), strength=1.0, low_rank=True)
        abstract = self.lora.parameters(self.training.models[name])
        adapted = AdaptedTransformer(
            source=self.source(name), abstract=abstract, mesh=self.training.mesh
        )
        return values_of(adapted.factors([adapter]))

    def base_identity(self) -> dict[str, str]:
        """Returns what a continued run must share, by name: adapters are of use on it alone."""
        digests, lora = component_digests(self.folder), self.lora
        identity = {
            "train_lora_rank": str(lora.rank),
            "train_lora_alpha": f"{lora.alpha:g}",
            "train_lora_modules": ", ".join(lora.names),
            "weights_dtype": str(self.training.weights_dtype),
        }
        for name in self.training.experts.names:
            notes = self.folder.weights[name].patch_notes
            identity[f"weights of {name}"] = " + ".join([digests[f"checkpoint {name}"], *notes])
        return identity

    @property
    def adapter_bytes(self) -> int:
        """Bytes of all adapters of the run."""
        experts = self.training.experts.names
        shapes = self.lora.parameters(self.training.models[experts[0]])
        return len(experts) * FLOAT_BYTES * _elements(shapes)

    def describe(self) -> list[str]:
        """Returns the lines of the start-up report."""
        training, lora = self.training, self.lora
        experts = training.experts.names
        base = without_rooms(training.models[experts[0]].parameters)
        held = len(experts) * sum(
            math.prod(one.shape) * one.dtype.itemsize for _, one in nnx.to_flat_state(base)
        )
        trained = self.adapter_bytes // FLOAT_BYTES
        share = trained / (len(experts) * _elements(base))
        return [
            f"{lora.describe()}, {self.spec.transformer.layers} layers of {', '.join(experts)}",
            f"memory: {trained:,} trainable parameters ({share:.2%} of the frozen ones), "
            f"{size(self.adapter_bytes)}, their mean {size(self.adapter_bytes)}, optimizer "
            f"{size(2 * self.adapter_bytes)}; frozen weights {size(held)} in "
            f"{training.weights_dtype}, in {training.mesh.shape['fsdp']} shards (fsdp)",
        ]

    def export(self, state: TrainState) -> None:
        """Writes the running means as LoRA files, one for each transformer.

        The first process writes, and all must call it.
        """
        table = transformer_map(self.spec.transformer)
        folder = as_path(self.config.export_dir)
        means = self.training.on_device(state.ema)
        for name in self.training.experts.names:
            tensors = AdapterTensors(
                values=means[name],
                table=table,
                entries=self.lora.entries(table),
                alpha=self.lora.alpha,
            )
            if jax.process_index() != 0:
                tensors.help_write()
                continue
            file = folder / ADAPTER_FILES[name]
            with writing("the trained adapters", folder), replacing(file) as unfinished:
                tensors.write(unfinished)
            logger.info(f"wrote {file}")
        barrier("export")


def size(count: int) -> str:
    """Returns bytes as text."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def _elements(parameters: nnx.State) -> int:
    return sum(math.prod(one.shape) for _, one in nnx.to_flat_state(parameters))


def find_adapter(location: str, name: str, experts: tuple[str, ...]) -> Path:
    """Returns the file that a transformer starts from."""
    path, usual = Path(location).expanduser(), ADAPTER_FILES[name]
    if (path / usual).is_file():
        return path / usual
    if len(experts) == 1:
        return find_lora(location, name=FIELD)
    if path.is_file():
        rule = f"is one file, and {' and '.join(experts)} start from one each"
        files = " and ".join(ADAPTER_FILES[one] for one in experts)
        remedy = f"Name a folder with {files}, or set train_experts to one expert"
        raise ProblemsFound([Problem(name=FIELD, value=location, rule=rule, remedy=remedy)])
    return find_lora(location, usual, name=FIELD)


def check_start(file: LoraFile, wanted: list[str], lora: LoraSettings) -> None:
    """Raises unless a file has one pair of the right rank for every wanted tensor, and no more."""
    problems = []

    def refuse(name: str, value: object, rule: str, remedy: str) -> None:
        problems.append(Problem(name=name, value=value, rule=rule, remedy=remedy))

    every = file.changes
    other = [name for name in every if name not in wanted]
    missing = [name for name in wanted if name not in every]
    names, remedy = file.file.name, "Name the modules of the file in train_lora_modules"
    if other:
        rule = f"{names} changes {len(other)} other tensors, such as {other[0]}"
        refuse("train_lora_modules", list(lora.names), rule, remedy)
    if missing:
        rule = f"{names} has no adapter of {len(missing)} tensors, such as {missing[0]}"
        refuse("train_lora_modules", list(lora.names), rule, remedy)
    pairs = [one for changes in every.values() for one in changes if isinstance(one, LowRank)]
    if len(pairs) != sum(map(len, every.values())):
        refuse(FIELD, str(file.file), "has differences of tensors next to its pairs", "Use another")
    ranks = sorted({pair.rank for pair in pairs})
    if ranks and ranks != [lora.rank]:
        one = len(ranks) == 1
        way = f"Set train_lora_rank={ranks[0]}" if one else "Start from a file of one rank"
        rule = f"{names} has adapters of rank {', '.join(map(str, ranks))}"
        refuse("train_lora_rank", lora.rank, rule, way)
    Collector(problems).raise_if_any()


def with_all_rooms(state: nnx.State, like: nnx.State, mesh: jax.sharding.Mesh) -> nnx.State:
    """Returns a transformer with the rooms that `like` has: its own, and empty ones."""
    held: dict[Any, Any] = dict(nnx.to_flat_state(with_rooms(state, like, mesh)))
    return nnx.from_flat_state([*{**held, **dict(nnx.to_flat_state(state))}.items()])

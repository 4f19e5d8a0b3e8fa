"""Weights of a pipeline: loaded from a folder, and changed by LoRA adapters as in diffusers.

    load_lora_weights --> loaded files --set_adapters--> active strengths --> weights on the devices

Weights follow the adapters when the next video is asked for, whatever the number of changes before
it, and nothing is compiled again. Adapters are fused: parameters that they change are read from
their files again, with the adapters added while they stream in, so that removing an adapter gives
back the very same weights. With `PipelineSettings.lora_rank` the pairs of the blocks are kept
low-rank instead: only their factors are sent to the devices.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flax import nnx
from jax.sharding import Mesh

from maxdiffusion.checkpoints.diffusers_folder import ModelFolder, download, is_hub_id
from maxdiffusion.checkpoints.load import ComponentSource, Progress, load_components, source_shapes
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.models.abstract import lay_out
from maxdiffusion.models.umt5.checkpoint import umt5_map
from maxdiffusion.models.vae.checkpoint import vae_map
from maxdiffusion.models.wan.checkpoint import transformer_map
from maxdiffusion.pipelines.programs import (
    ProgramBuilder,
)
from maxdiffusion.pipelines.settings import Precision
from maxdiffusion.pipelines.spec import WanSpec, wan_models
from maxdiffusion.runtime.files import FilePath

if TYPE_CHECKING:
    from maxdiffusion.checkpoints.lora import Adapter, LoraFile

logger = logging.getLogger(__name__)

FIRST, SECOND = "transformer", "transformer_2"
Strength = float | Mapping[str, float] | None
Strengths = Strength | Sequence[Strength]
# Files that diffusers and PEFT write; a folder with one other file needs no name either.
USUAL_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")


def find_lora(location: str | Path, weight_name: str = "", *, name: str = "LoRA file") -> Path:
    """Returns the LoRA file at a path, in a folder or on the hub; `weight_name` names it there.

    Problems carry the name of the field `name`.
    """
    path = Path(location).expanduser()
    if path.is_file():
        return path
    if is_hub_id(location):
        wanted = (weight_name,) if weight_name else USUAL_FILES
        path = download(str(location), (*wanted, "adapter_config.json"), name=name)
    if weight_name:
        candidates = [path / weight_name]
    else:
        usual = [path / file for file in USUAL_FILES if (path / file).is_file()]
        candidates = usual[:1] or sorted(path.glob("*.safetensors"))
    found = [file for file in candidates if file.is_file()]
    if len(found) == 1:
        return found[0]
    names = ", ".join(file.name for file in found)
    rule = f"holds several files: {names}" if found else "has no such .safetensors file"
    value = f"{location}/{weight_name}" if weight_name else str(location)
    remedy = "Give the path of one file, or its folder and its name in weight_name"
    raise ProblemsFound([Problem(name=name, value=value, rule=rule, remedy=remedy)])


def read_adapter(file: Path, source: ComponentSource, *, strict: bool) -> "LoraFile":
    """Returns a LoRA file matched to a transformer, and logs its report.

    Raises ProblemsFound if it does not fit.
    """
    # Both for adapters alone.
    from maxdiffusion.checkpoints.lora import LoraTargets, read_lora
    from maxdiffusion.models.wan.original import original_module

    targets = LoraTargets.of(source_shapes(source.table, source.abstract), original_module)
    lora = read_lora(file, targets)
    lora.check(strict=strict)
    logger.info("LoRA %s", lora.describe())
    return lora


@dataclass(frozen=True, kw_only=True)
class LoraChoice:
    """A LoRA file that a config adds to one transformer; a server knows it by its name."""

    component: str
    location: str
    weight_name: str = ""
    strength: float = 1.0
    name: str = ""


def with_lora(
    folder: "ModelFolder", spec: WanSpec, choices: Sequence[LoraChoice], *, strict: bool
) -> "ModelFolder":
    """Returns the folder with these files fused into its transformers while they are read.

    Raises everything that does not fit, before a weight is read.
    """
    from maxdiffusion.checkpoints.lora import Adapter, fuse

    abstract = wan_models(spec, Precision()).transformer.parameters
    table = transformer_map(spec.transformer)
    weights, problems = dict(folder.weights), Collector()
    for choice in choices:
        with problems:
            file = find_lora(choice.location, choice.weight_name, name="lora_config")
            stored = weights[choice.component]
            source = ComponentSource(stored=stored, table=table, abstract=abstract)
            lora = read_adapter(file, source, strict=strict)
            logger.info("LoRA %s: %s at %g", choice.component, file.name, choice.strength)
            adapter = Adapter(lora=lora, strength=choice.strength)
            weights[choice.component] = fuse(stored, [adapter])
    problems.raise_if_any()
    return replace(folder, weights=weights)


@dataclass(kw_only=True)
class _Expert:
    """The adapters of one transformer."""

    source: ComponentSource
    loaded: dict[str, "LoraFile"] = field(default_factory=dict)
    active: dict[str, float] = field(default_factory=dict)
    fused: dict[str, "Adapter"] = field(default_factory=dict)
    kept: "tuple[Adapter, ...]" = ()  # fused, then unloaded: part of the model from then on
    on_device: "tuple[Adapter, ...]" = ()  # what the weights on the devices contain

    def wanted(self, *, enabled: bool) -> "tuple[Adapter, ...]":
        """Returns the adapters that belong into the weights: fused ones, then active ones."""
        from maxdiffusion.checkpoints.lora import Adapter

        added = [
            Adapter(lora=self.loaded[name], strength=strength, low_rank=True)
            for name, strength in self.active.items()
            if enabled and name not in self.fused
        ]
        return (*self.kept, *self.fused.values(), *added)


class LoraAdapters:
    """The adapters of a pipeline's transformers, and the weights that follow from them."""

    def __init__(
        self, sources: Mapping[str, ComponentSource], abstract: nnx.State, mesh: Mesh | None
    ):
        """`abstract` are the parameters of a transformer, with the rooms for adapters."""
        self._experts = {name: _Expert(source=source) for name, source in sources.items()}
        self._abstract, self._mesh = abstract, mesh
        self.enabled = True

    @property
    def loaded(self) -> dict[str, list[str]]:
        """The names of the loaded adapters of each transformer."""
        return {name: [*expert.loaded] for name, expert in self._experts.items() if expert.loaded}

    @property
    def active(self) -> dict[str, dict[str, float]]:
        """The strength of every active adapter of each transformer."""
        return {name: {**expert.active} for name, expert in self._experts.items() if expert.active}

    def load(self, file: Path, adapter_name: str | None, component: str, *, strict: bool) -> None:
        """Loads an adapter, which becomes the only active one of its transformer, as in PEFT."""
        if component not in self._experts:
            rule = f"this model has only {', '.join(self._experts)}"
            raise ValueError(f"load_into_transformer_2=True: {rule}. Leave it out.")
        expert = self._experts[component]
        name = f"default_{len(expert.loaded)}" if adapter_name is None else adapter_name
        if name in expert.loaded:
            raise ValueError(
                f"adapter_name={name!r}: is in use in the {component}. Choose another name, or "
                "remove that adapter with delete_adapters first."
            )
        expert.loaded[name] = read_adapter(file, expert.source, strict=strict)
        expert.active = {name: 1.0}

    def set(self, names: Sequence[str], strengths: Strengths) -> None:
        """Makes exactly these adapters active; a transformer ignores names that it lacks."""
        known = {name for expert in self._experts.values() for name in expert.loaded}
        unknown = [name for name in names if name not in known]
        if unknown:
            have = ", ".join(sorted(known)) or "none"
            raise ValueError(f"adapter_names={unknown}: not loaded. Loaded adapters: {have}.")
        chosen = dict(zip(names, _for_each(names, strengths), strict=True))
        for component, expert in self._experts.items():
            expert.active = {
                name: _strength_of(strength, component, tuple(self._experts))
                for name, strength in chosen.items()
                if name in expert.loaded
            }

    def fuse(
        self, components: Sequence[str], lora_scale: float, names: Sequence[str] | None
    ) -> None:
        """Makes active adapters part of the weights, so that unloading keeps them."""
        from maxdiffusion.checkpoints.lora import Adapter

        for component in components:
            expert = self._expert(component)
            if not expert.loaded:
                raise ValueError(f"components={component!r}: it has no adapter to fuse.")
            for name in expert.active if names is None else names:
                if name not in expert.loaded:
                    raise ValueError(f"adapter_names={name!r}: is not loaded in the {component}.")
                strength = lora_scale * expert.active.get(name, 1.0)
                expert.fused[name] = Adapter(lora=expert.loaded[name], strength=strength)

    def unfuse(self, components: Sequence[str]) -> None:
        """Takes back what `fuse` did for these transformers."""
        for component in components:
            self._expert(component).fused.clear()

    def delete(self, names: Sequence[str]) -> None:
        """Removes adapters from every transformer that has them."""
        for name in names:
            if not any(name in loaded for loaded in self.loaded.values()):
                raise ValueError(f"adapter_names={name!r}: is not loaded.")
            for expert in self._experts.values():
                for held in (expert.loaded, expert.active, expert.fused):
                    held.pop(name, None)

    def unload(self) -> None:
        """Removes all adapters; what was fused stays in the weights."""
        for expert in self._experts.values():
            expert.kept = (*expert.kept, *expert.fused.values())
            expert.fused.clear()
            expert.loaded.clear()
            expert.active.clear()

    def stale(self) -> list[str]:
        """Returns the transformers whose weights do not contain what they should."""
        return [
            name
            for name, expert in self._experts.items()
            if expert.wanted(enabled=self.enabled) != expert.on_device
        ]

    def refresh(self, held: dict[str, nnx.State]) -> None:
        """Replaces the transformers in `held` whose adapters changed, or adds missing ones.

        What is replaced is removed first; the caller holds no other reference, so that it is freed.
        """
        from maxdiffusion.checkpoints.lora_update import AdaptedTransformer

        stale = [name for name in self._experts if name in self.stale() or name not in held]
        adapted = {
            name: AdaptedTransformer(
                source=self._experts[name].source, abstract=self._abstract, mesh=self._mesh
            )
            for name in stale
        }
        after = {name: self._experts[name].wanted(enabled=self.enabled) for name in stale}
        for name in stale:
            adapted[name].check(after[name])
        for name in stale:
            expert, began = self._experts[name], time.perf_counter()
            parameters = dict(nnx.to_flat_state(held.pop(name))) if name in held else {}
            held[name] = adapted[name].update(parameters, expert.on_device, after[name])
            expert.on_device = after[name]
            logger.info("LoRA: %s follows in %.1f s", name, time.perf_counter() - began)

    def _expert(self, component: str) -> _Expert:
        if component not in self._experts:
            have = ", ".join(self._experts)
            raise ValueError(f"components={component!r}: must be one of {have}.")
        return self._experts[component]


def _for_each(names: Sequence[str], strengths: Strengths) -> list[Strength]:
    """Returns a strength for each adapter."""
    if strengths is None or isinstance(strengths, int | float | Mapping):
        return [strengths] * len(names)
    if len(strengths) != len(names):
        raise ValueError(
            f"adapter_weights={strengths}: {len(strengths)} strengths for {len(names)} adapters. "
            "Give one for each, or one number for all."
        )
    return [*strengths]


def _strength_of(strength: Strength, component: str, components: Sequence[str]) -> float:
    """Returns the strength of an adapter in a transformer; 1 where none is given."""
    if strength is None:
        return 1.0
    if isinstance(strength, Mapping):
        unknown = sorted(set(strength) - set(components))
        if unknown:
            have = ", ".join(components)
            raise ValueError(f"adapter_weights={unknown}: must be among the transformers, {have}.")
        return float(strength.get(component, 1.0))
    return float(strength)


class LoraMethods(ABC):
    """Methods of a pipeline that manage LoRA adapters, named as in diffusers."""

    @property
    @abstractmethod
    def lora(self) -> LoraAdapters:
        """The adapters. Raises if the pipeline was made without the files of its weights."""

    def load_lora_weights(
        self,
        pretrained_model_name_or_path: str | Path,
        adapter_name: str | None = None,
        *,
        weight_name: str = "",
        load_into_transformer_2: bool = False,
        strict: bool = True,
    ) -> None:
        """Loads a LoRA file for one transformer; it becomes the only active adapter there.

        The file may be a path, or in a folder or hub repository (`weight_name` names it there).
        Without `strict`, tensors that the model has no place for are listed and left out.
        """
        file = find_lora(pretrained_model_name_or_path, weight_name)
        component = SECOND if load_into_transformer_2 else FIRST
        self.lora.load(file, adapter_name, component, strict=strict)

    def set_adapters(
        self, adapter_names: str | Sequence[str], adapter_weights: Strengths = None
    ) -> None:
        """Makes exactly these adapters active, in both transformers.

        A weight is a number, or one for each transformer: {"transformer": 0.8, "transformer_2": 1}.
        """
        self.lora.set(_listed(adapter_names), adapter_weights)

    def get_active_adapters(self) -> list[str]:
        """Returns the names of the active adapters."""
        active = [name for strengths in self.lora.active.values() for name in strengths]
        return [*dict.fromkeys(active)]

    def get_list_adapters(self) -> dict[str, list[str]]:
        """Returns the names of the loaded adapters of each transformer."""
        return self.lora.loaded

    def enable_lora(self) -> None:
        """Applies the active adapters again."""
        self.lora.enabled = True

    def disable_lora(self) -> None:
        """Leaves out all adapters that are not fused, until `enable_lora`."""
        self.lora.enabled = False

    def delete_adapters(self, adapter_names: str | Sequence[str]) -> None:
        """Removes adapters."""
        self.lora.delete(_listed(adapter_names))

    def fuse_lora(
        self,
        components: Sequence[str] = (FIRST,),
        lora_scale: float = 1.0,
        adapter_names: Sequence[str] | None = None,
    ) -> None:
        """Makes adapters part of the weights: the active ones, or those that are named."""
        self.lora.fuse(components, lora_scale, adapter_names)

    def unfuse_lora(self, components: Sequence[str] = (FIRST,)) -> None:
        """Takes adapters out of the weights again; active ones stay active."""
        self.lora.unfuse(components)

    def unload_lora_weights(self) -> None:
        """Removes all adapters; fused ones stay in the weights."""
        self.lora.unload()


def _listed(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else [*names]


@dataclass(frozen=True, kw_only=True)
class WanParameters:
    """Weights of a model on its mesh; `transformers` by the names of their folders.

    A run whose prompts are all cached has no text encoder.
    """

    transformers: dict[str, nnx.State]
    vae: nnx.State
    text_encoder: nnx.State | None
    image_encoder: nnx.State | None = None

    @classmethod
    def described(cls, builder: ProgramBuilder, without: Sequence[str] = ()) -> "WanParameters":
        """Returns shapes and shardings of the weights: enough to compile programs."""
        models, mesh = builder.models, builder.mesh
        encoder, images = models.text_encoder, models.image_encoder
        return cls(
            transformers=dict.fromkeys(builder.spec.experts, builder.weights),
            vae=models.vae.on(mesh),
            text_encoder=None if "text_encoder" in without else encoder.on(mesh),
            image_encoder=None if images is None else images.on(mesh),
        )


@dataclass(frozen=True, kw_only=True)
class LoadedParameters:
    """Weights, and the messages of the weight cache."""

    parameters: WanParameters
    messages: tuple[str, ...]


def component_sources(folder: ModelFolder, builder: ProgramBuilder) -> dict[str, ComponentSource]:
    """Returns the stored weights, checkpoint map and abstract parameters of every component."""
    spec, models = builder.spec, builder.models
    table, abstract = transformer_map(spec.transformer), models.transformer.parameters
    if spec.transformer.adapter_rank:
        from maxdiffusion.checkpoints.lora_update import without_rooms  # for `lora_rank` alone

        abstract = without_rooms(abstract)
    sources = {
        name: ComponentSource(stored=folder.weights[name], table=table, abstract=abstract)
        for name in spec.experts
    }
    sources["vae"] = ComponentSource(
        stored=folder.weights["vae"], table=vae_map(spec.vae), abstract=models.vae.parameters
    )
    sources["text_encoder"] = ComponentSource(
        stored=folder.weights["text_encoder"],
        table=umt5_map(spec.text_encoder),
        abstract=models.text_encoder.parameters,
    )
    if models.image_encoder is not None and spec.image_encoder is not None:
        from maxdiffusion.models.clip.checkpoint import clip_map

        sources["image_encoder"] = ComponentSource(
            stored=folder.weights["image_encoder"],
            table=clip_map(spec.image_encoder),
            abstract=models.image_encoder.parameters,
        )
    return sources


def load_wan_parameters(
    folder: ModelFolder,
    builder: ProgramBuilder,
    *,
    without: Collection[str] = (),
    cache: FilePath | None = None,
    progress: Progress | None = None,
) -> LoadedParameters:
    """Returns the parameters of a model, through the orbax `cache` if there is one.

    `without` names components that are not loaded.
    """
    sources = {
        name: source
        for name, source in component_sources(folder, builder).items()
        if name not in without
    }
    if cache is None:
        states, _ = load_components(sources, mesh=builder.mesh, progress=progress)
        messages: tuple[str, ...] = ()
    else:
        # Loaded only for `pretrained_orbax_dir`.
        from maxdiffusion.checkpoints.orbax_cache import load_through_cache

        cached = load_through_cache(sources, cache, mesh=builder.mesh, progress=progress)
        states, messages = dict(cached.states), cached.messages
    parameters = WanParameters(
        transformers={name: _with_rooms(states[name], builder) for name in builder.spec.experts},
        vae=states["vae"],
        text_encoder=states.get("text_encoder"),
        image_encoder=states.get("image_encoder"),
    )
    return LoadedParameters(parameters=parameters, messages=messages)


def lay_out_parameters(parameters: WanParameters, builder: ProgramBuilder) -> None:
    """Copies parameters, in place, to the device layouts that the programs of a builder read.

    Devices whose programs read the default layouts copy nothing.
    """
    models = builder.models
    for state in parameters.transformers.values():
        lay_out(state, builder.weights)
    if parameters.text_encoder is not None:
        lay_out(parameters.text_encoder, models.text_encoder.on(builder.mesh))
    if parameters.image_encoder is not None and models.image_encoder is not None:
        lay_out(parameters.image_encoder, models.image_encoder.on(builder.mesh))


def _with_rooms(state: nnx.State, builder: ProgramBuilder) -> nnx.State:
    """Returns a loaded transformer with empty rooms for adapters, if the model has any."""
    if not builder.spec.transformer.adapter_rank:
        return state
    from maxdiffusion.checkpoints.lora_update import with_rooms  # for `lora_rank` alone

    return with_rooms(state, builder.models.transformer.parameters, builder.mesh)

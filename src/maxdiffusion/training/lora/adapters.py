"""LoRA adapters of a training: their linear maps, their first values and their part in a loss.

    y = x W + b + (alpha / rank) x A B        A: `lora_down`, B: `lora_up` of a `Linear`

A `TrainState` holds A and B alone, in float32. W, b and all other weights are frozen: they are an
input of the step that is neither donated nor saved. A is drawn and B is zero, as in PEFT, so that
new adapters change nothing.
"""

import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, PRNGKeyArray

from maxdiffusion.checkpoints.lora_update import DOWN, UP
from maxdiffusion.config import Config
from maxdiffusion.config.fields import nearest_word
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.models.abstract import AbstractModel, Values, dotted
from maxdiffusion.models.checkpoint_map import LAYER, CheckpointMap, Entry
from maxdiffusion.models.wan import WanTransformer, WanTransformerConfig
from maxdiffusion.models.wan.checkpoint import transformer_map
from maxdiffusion.models.wan.layers import Linear
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.training.step import Loss

BLOCKS = "blocks"
SWITCH = "train_lora"
OF_ADAPTERS = ("train_lora_rank", "train_lora_alpha", "train_lora_modules", "train_lora_from")


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Rank, alpha and linear maps of the adapters that a run trains."""

    rank: int
    alpha: float
    names: tuple[str, ...]  # diffusers' inside a block, such as `ffn.net.2`
    modules: tuple[str, ...]  # the same as paths of ours, such as `blocks.ffn.down`

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise ValueError(f"rank={self.rank}, alpha={self.alpha}: both must be above 0")
        if not self.modules or len(self.modules) != len(self.names):
            raise ValueError(f"modules={self.modules}: must have the names {self.names}")

    @property
    def scale(self) -> float:
        """The factor of x A B."""
        return self.alpha / self.rank

    @property
    def paths(self) -> tuple[str, ...]:
        """The parameters that are trained."""
        return tuple(f"{module}.{part}" for module in self.modules for part in (DOWN, UP))

    def entries(self, table: CheckpointMap) -> tuple[Entry, ...]:
        """Returns the kernels that adapters change, in the order of the table."""
        wanted = {f"{module}.kernel" for module in self.modules}
        return tuple(entry for entry in table.entries if entry.parameter in wanted)

    def keep_rooms(self, transformer: WanTransformer) -> WanTransformer:
        """Returns the transformer after removing the rooms of all other linear maps."""
        for name in block_modules(transformer_map(transformer.config)).values():
            if name not in self.modules:
                module: Any = reduce(getattr, name.split("."), transformer)
                assert isinstance(module, Linear)
                module.remove_room()
        return transformer

    def scaled(self, values: Mapping[str, jax.Array]) -> Values:
        """Returns the parameters with every B times alpha / rank, as `Linear` takes them."""
        ups = {path: values[path] * self.scale for path in self.paths if path.endswith(UP)}
        return {**values, **ups}

    def parameters(self, model: AbstractModel[Any]) -> nnx.State:
        """Returns the abstract adapters of a model, in float32."""
        flat = nnx.to_flat_state(model.parameters)
        return nnx.from_flat_state(
            [
                (path, one.replace(jax.ShapeDtypeStruct(one.shape, np.dtype(np.float32))))
                for path, one in flat
                if dotted(path) in self.paths
            ]
        )

    def first_values(self, model: AbstractModel[Any], *, seed: int, mesh: Mesh) -> Values:
        """Returns new adapters, the same on every mesh."""
        shapes = {
            dotted(path): one.shape for path, one in nnx.to_flat_state(self.parameters(model))
        }
        shardings = {path: model.shardings(mesh)[path] for path in shapes}

        def draw() -> Values:
            key = jax.random.key(seed)
            return {path: _first(key, path, shape) for path, shape in shapes.items()}

        with jax.set_mesh(mesh):
            return jax.jit(draw, out_shardings=shardings)()

    def describe(self) -> str:
        """Returns the line of the start-up report."""
        names = ", ".join(self.names)
        return f"LoRA: rank {self.rank}, alpha {self.alpha:g} (scale {self.scale:g}) of {names}"


def _first(key: PRNGKeyArray, path: str, shape: tuple[int, ...]) -> Float[Array, "L _ _"]:
    """Returns A drawn evenly up to 1 / sqrt(inputs), PEFT's kaiming_uniform, or B = 0."""
    if path.endswith(UP):
        return jnp.zeros(shape, jnp.float32)
    bound = 1 / math.sqrt(shape[-2])
    own = jax.random.fold_in(key, zlib.crc32(path.encode()))
    return jax.random.uniform(own, shape, jnp.float32, -bound, bound)


@dataclass(frozen=True, kw_only=True)
class AdapterLoss:
    """The loss of a transformer whose adapters are values before their scale."""

    loss: Loss
    expert: str
    lora: LoraSettings

    def __call__(
        self, values: Mapping[str, Values], batch: Any, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Any]:
        return self.loss({**values, self.expert: self.lora.scaled(values[self.expert])}, batch, key)


def block_modules(table: CheckpointMap) -> dict[str, str]:
    """Returns the linear maps of a block: diffusers' name inside it -> our path."""
    start, end = f"{BLOCKS}.{LAYER}.", ".weight"
    return {
        entry.source[len(start) : -len(end)]: entry.parameter.removesuffix(".kernel")
        for entry in table.entries
        if entry.source.startswith(start) and entry.parameter.endswith(".kernel")
    }


def lora_settings(config: Config, transformer: WanTransformerConfig) -> LoraSettings | None:
    """Returns the adapters of a config, or None for a training of all weights."""
    if not config.train_lora:
        return None
    alpha, modules = config.train_lora_alpha, block_modules(transformer_map(transformer))
    names = _matched(config.train_lora_modules, modules)
    return LoraSettings(
        rank=config.train_lora_rank,
        alpha=float(config.train_lora_rank) if alpha is None else alpha,
        names=names,
        modules=tuple(modules[name] for name in names),
    )


def _matched(targets: tuple[str, ...], modules: Collection[str]) -> tuple[str, ...]:
    """Returns the modules whose names end in one of the targets, as PEFT matches them."""
    problems = []
    found: set[str] = set()
    known = sorted({end for name in modules for end in _ends(name)})
    for target in targets:
        names = [name for name in modules if target in _ends(name)]
        found.update(names)
        if not names:
            rule = f"no linear map of a block has this name; there are {', '.join(modules)}"
            remedy = nearest_word(target, known) or "Name one of them, or the end of one"
            problems.append(_problem("train_lora_modules", target, rule, remedy))
    if not targets:
        rule = f"names no linear map; there are {', '.join(modules)}"
        problems.append(_problem("train_lora_modules", [], rule, "Name at least one"))
    Collector(problems).raise_if_any()
    return tuple(name for name in modules if name in found)


def _ends(name: str) -> Iterator[str]:
    """Yields the ends of a dotted name that begin with a word, the name itself first."""
    parts = name.split(".")
    for start, part in enumerate(parts):
        if not part.isdigit():
            yield ".".join(parts[start:])


def check_lora(config: Config) -> None:
    """Raises ProblemsFound with every field that does not go with the training of adapters."""
    problems = []
    if not config.train_lora:
        rule, remedy = f"has a meaning for {SWITCH}: true only", f"Set {SWITCH}=true"
        problems = [
            _problem(name, vars(config)[name], rule, f"{remedy}, or leave it out")
            for name in OF_ADAPTERS
            if config.given(name)
        ]
        Collector(problems).raise_if_any()
        return
    whole = f"{SWITCH} trains adapters on the weights of the model as they are"
    for name, rule in (
        ("train_from_scratch", whole),
        ("train_text_encoder", f"{SWITCH} trains adapters of the transformers alone"),
    ):
        if vars(config)[name]:
            problems.append(_problem(name, True, rule, f"Set {name}=false or {SWITCH}=false"))
    if config.overridden("text_encoder_learning_rate"):
        name, value = "text_encoder_learning_rate", config.text_encoder_learning_rate
        rule = f"{SWITCH} does not train the text encoder"
        problems.append(_problem(name, value, rule, "Leave it out"))
    if config.lora_rank:
        rule = "is room for adapters that change between videos of a generation"
        remedy = "Leave it out; train_lora_rank is the rank of trained adapters"
        problems.append(_problem("lora_rank", config.lora_rank, rule, remedy))
    Collector(problems).raise_if_any()


def check_experts(config: Config, spec: WanSpec) -> None:
    """Raises ProblemsFound if one adapter was asked for two experts."""
    if config.train_lora and spec.boundary_ratio is not None and config.train_experts == "shared":
        rule = "the experts of this model have weights of their own, and so have their adapters"
        remedy = "Use train_experts=both, high_noise or low_noise"
        raise ProblemsFound([_problem("train_experts", "shared", rule, remedy)])


def _problem(name: str, value: object, rule: str, remedy: str) -> Problem:
    return Problem(name=name, value=value, rule=rule, remedy=remedy)

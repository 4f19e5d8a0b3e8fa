"""One training step: gradient (accumulated over microbatches), clipping, AdamW, running mean.

    (TrainState, batch) --make_step--> (TrainState, StepReport)

`TrainState` holds everything that a step changes; checkpoints save and restore it. Frozen weights
of models that are trained in part (LoRA) are a third input.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray

from maxdiffusion.models.abstract import AbstractModel, Values, master, register_tree
from maxdiffusion.training.memory.moments import MomentsFormat, pack_moments, unpack_moments
from maxdiffusion.training.memory.placement import (
    HOST,
    StatePlacement,
    in_memory,
    state_shardings,
)

ROUNDING_STREAM = 7  # of a step's PRNG key; a loss uses the first ones


class Decay(Enum):
    """Names the course of the learning rate after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"


class Clipping(Enum):
    """Names what of the gradient is clipped."""

    NONE = "none"
    GLOBAL_NORM = "global_norm"
    VALUE = "value"


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Learning rate: linear warm-up to `peak`, then constant, or a cosine down to a share."""

    peak: float
    steps: int
    warmup_share: float = 0.1
    decay: Decay = Decay.CONSTANT
    final_share: float = 0.02

    def __post_init__(self) -> None:
        if not self.peak > 0 or self.steps < 1:
            raise ValueError(f"peak={self.peak}, steps={self.steps}: both must be above 0")
        if not 0 <= self.warmup_share <= 1 or not 0 <= self.final_share <= 1:
            raise ValueError("warmup_share and final_share: must be between 0 and 1")

    def __call__(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Returns the rate of the step after `step` finished ones."""
        warmup = max(1, round(self.warmup_share * self.steps))
        rising = (step + 1) / warmup
        if self.decay is Decay.CONSTANT:
            return self.peak * jnp.minimum(rising, 1.0)
        falling = optax.cosine_decay_schedule(
            1.0, max(1, self.steps - warmup), alpha=self.final_share
        )
        return self.peak * jnp.minimum(rising, falling((step - warmup).astype(jnp.float32)))


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """AdamW, gradient clipping and the running mean of parameters.

    `rates` scale the learning rate of single models, such as a text encoder. The decay of the
    running mean after n steps is (1 + n) / (10 + n) up to `ema_decay`, so that it does not hold on
    to the random start. `moments` is the format that they are kept in between steps.
    """

    learning_rate: LearningRate
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clipping: Clipping = Clipping.NONE
    clip_at: float = 1.0
    ema_decay: float = 0.999
    moments: MomentsFormat = MomentsFormat.FLOAT32
    rates: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, value in (("b1", self.b1), ("b2", self.b2), ("ema_decay", self.ema_decay)):
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value}: must be at least 0 and less than 1")
        if not self.clip_at > 0:
            raise ValueError(f"clip_at={self.clip_at}: must be above 0")

    @property
    def _adam(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.eps),
            optax.add_decayed_weights(self.weight_decay),
        )

    def start(self, values: Mapping[str, jax.Array]) -> Any:
        """Returns the moments of one model before its first step."""
        return pack_moments(self._adam.init(values), self.moments, jax.random.key(0))

    def clip(self, gradients: Any, norm: Float[Array, ""]) -> Any:
        """Returns the clipped gradients of all models, whose joint norm is `norm`."""
        if self.clipping is Clipping.NONE:
            return gradients
        if self.clipping is Clipping.VALUE:
            return jax.tree.map(lambda g: jnp.clip(g, -self.clip_at, self.clip_at), gradients)
        scale = jnp.minimum(1.0, self.clip_at / jnp.maximum(norm, 1e-12))
        return jax.tree.map(lambda g: g * scale, gradients)

    def update(
        self, name: str, values: Any, gradients: Any, moments: Any, state: "TrainState"
    ) -> tuple[Any, Any]:
        """Returns the parameters of one model after a step from `state`, and its moments."""
        moments = unpack_moments(moments, self.moments)
        # optax counts its steps in int32 and relies on the standard promotion to float32.
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = self._adam.update(gradients, moments, values)
        rate = self.learning_rate(state.step) * self.rates.get(name, 1.0)
        key = jax.random.fold_in(state.step_key, ROUNDING_STREAM)
        packed = pack_moments(moments, self.moments, key)
        return jax.tree.map(lambda v, u: v - rate * u, values, updates), packed

    def average(self, ema: Any, values: Any, step: Int[Array, ""]) -> Any:
        """Returns the running mean after a step."""
        count = step.astype(jnp.float32)
        keep = jnp.minimum(self.ema_decay, (1 + count) / (10 + count))
        return jax.tree.map(lambda old, new: keep * old + (1 - keep) * new, ema, values)


@register_tree
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Parameters (float32), their running mean, optimiser moments, step and PRNG key.

    All but step and key are by the name of the model: `transformer`, `text_encoder`, `vae`, ...
    The key never changes: a step folds its number into it.
    """

    step: Int[Array, ""]
    key: PRNGKeyArray
    values: dict[str, Values]
    ema: dict[str, Values]
    moments: dict[str, Any]

    @property
    def step_key(self) -> PRNGKeyArray:
        """The PRNG key of the next step."""
        return jax.random.fold_in(self.key, self.step)


def first_state(
    values: Mapping[str, Values],
    optimiser: Optimiser,
    *,
    seed: int,
    mesh: Mesh,
    placement: StatePlacement | None = None,
) -> TrainState:
    """Returns the state before the first step, placed on the mesh."""
    start = partial(_start, optimiser, seed)
    masters = {name: master(part) for name, part in values.items()}
    where = placement or StatePlacement()
    shardings = state_shardings(jax.eval_shape(start, masters), masters, mesh, where)
    with jax.set_mesh(mesh):
        return jax.jit(start, out_shardings=shardings)(masters)


def first_state_of_each(
    parts: Iterable[tuple[str, Values]],
    optimiser: Optimiser,
    *,
    seed: int,
    mesh: Mesh,
    placement: StatePlacement,
) -> TrainState:
    """Returns the state before the first step of models that are loaded one after the other.

    Where experts take turns, each moves to host memory before the next one is loaded.
    """
    state: TrainState | None = None
    for name, values in parts:
        settings: dict[str, Any] = {"seed": seed, "mesh": mesh, "placement": placement}
        part = first_state({name: values}, optimiser, **settings)
        others = split_state(part, ())[1]
        if placement.parks:
            others = in_memory(others, HOST)
        state = join_state(part if state is None else state, others)
    assert state is not None, "a training has a model"
    return state


def abstract_state(
    values: Mapping[str, Mapping[str, jax.ShapeDtypeStruct]],
    optimiser: Optimiser,
    *,
    mesh: Mesh,
    placement: StatePlacement,
) -> TrainState:
    """Returns the state of abstract float32 parameters: shapes, dtypes and shardings."""
    state = jax.eval_shape(partial(_start, optimiser, 0), values)
    shardings = state_shardings(state, values, mesh, placement)

    def placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, state, shardings)


def _start(optimiser: Optimiser, seed: int, values: dict[str, Values]) -> TrainState:
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        key=jax.random.key(seed),
        values=values,
        ema=jax.tree.map(jnp.copy, values),
        moments={name: optimiser.start(part) for name, part in values.items()},
    )


StateParts = dict[str, dict[str, Any]]  # values, ema and moments by the name of the model


def split_state(state: TrainState, models: Sequence[str] | None) -> tuple[TrainState, StateParts]:
    """Returns the state of some models (None: of all), and everything of the others."""
    kinds = {"values": state.values, "ema": state.ema, "moments": state.moments}
    if models is None:
        return state, {kind: {} for kind in kinds}
    ours = {kind: {n: held[n] for n in held if n in models} for kind, held in kinds.items()}
    others = {kind: {n: held[n] for n in held if n not in models} for kind, held in kinds.items()}
    part = replace(state, values=ours["values"], ema=ours["ema"], moments=ours["moments"])
    return part, others


def join_state(state: TrainState, others: StateParts) -> TrainState:
    """Returns a state with the parts that `split_state` set aside."""
    return replace(
        state,
        values={**state.values, **others["values"]},
        ema={**state.ema, **others["ema"]},
        moments={**state.moments, **others["moments"]},
    )


def place_values(
    values: Mapping[str, jax.Array | np.ndarray], model: AbstractModel[Any], mesh: Mesh
) -> Values:
    """Returns parameters in their shardings on the mesh."""
    shardings = model.shardings(mesh)
    return {path: jax.device_put(value, shardings[path]) for path, value in values.items()}


@runtime_checkable
class Loss(Protocol):
    """Interface of a loss: a mean over a batch, and figures that are summed over microbatches."""

    def __call__(
        self, values: Mapping[str, Values], batch: Any, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Any]:
        """Returns the loss of a batch and its figures."""


@register_tree
@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Metrics of a step; `norms` are of the gradients of groups of parameters."""

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]
    figures: Any
    norms: Mapping[str, Float[Array, ""]] = field(default_factory=dict)


Step = Callable[[TrainState, Any], tuple[TrainState, StepReport]]
StepOnFrozen = Callable[..., tuple[TrainState, StepReport]]
"""A step whose optional third input are frozen parameters by the name of their model."""
NOT_FROZEN: Mapping[str, Values] = {}


def joined(frozen: Mapping[str, Values], values: Mapping[str, Values]) -> dict[str, Values]:
    """Returns the parameters of all models: frozen ones, and those of a state."""
    return {name: {**frozen.get(name, {}), **values.get(name, {})} for name in {**frozen, **values}}


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The placement of a state, and the shardings of its parameters by model.

    Only a placement that is not the default one reads the shardings.
    """

    placement: StatePlacement = field(default_factory=StatePlacement)
    shardings: Mapping[str, Mapping[str, NamedSharding]] = field(default_factory=dict, hash=False)


AS_WEIGHTS = Placed()


def make_step(
    loss: Loss,
    optimiser: Optimiser,
    *,
    trained: tuple[str, ...],
    accumulation: int = 1,
    placed: Placed = AS_WEIGHTS,
) -> StepOnFrozen:
    """Returns the step that trains the models named `trained` and leaves the others unchanged.

    A batch is split into `accumulation` microbatches; the result is that of the whole batch up to
    rounding and the random draws of the microbatches.
    """
    if accumulation < 1:
        raise ValueError(f"accumulation={accumulation}: must be at least 1")

    def step(
        state: TrainState, batch: Any, frozen: Mapping[str, Values] = NOT_FROZEN
    ) -> tuple[TrainState, StepReport]:
        active = {name: state.values[name] for name in trained}
        rest = {name: part for name, part in state.values.items() if name not in trained}

        def of_microbatch(values: dict[str, Values], rows: Any, key: PRNGKeyArray) -> Any:
            return loss(joined(frozen, {**rest, **values}), rows, key)

        gradient = jax.value_and_grad(of_microbatch, has_aux=True)
        (value, figures), gradients = _accumulated(gradient, active, batch, state, accumulation)
        norm = optax.tree.norm(gradients)
        report = StepReport(
            loss=value,
            gradient_norm=norm,
            learning_rate=optimiser.learning_rate(state.step),
            figures=figures,
            norms=group_norms(gradients),
        )
        return _updated(state, optimiser.clip(gradients, norm), optimiser, placed), report

    return step


def group_norms(gradients: Mapping[str, Values]) -> dict[str, Float[Array, ""]]:
    """Returns the norms of the gradients by model and part, such as `transformer.blocks.attn1`."""
    groups: dict[str, list[Array]] = {}
    for model, part in gradients.items():
        for path, gradient in part.items():
            first, *rest = path.split(".")
            group = ".".join([model, first, *rest[:1]] if first == "blocks" else [model, first])
            groups.setdefault(group, []).append(gradient)
    return {group: optax.tree.norm(held) for group, held in groups.items()}


def _accumulated(
    gradient: Callable[..., Any],
    active: dict[str, Values],
    batch: Any,
    state: TrainState,
    count: int,
) -> Any:
    """Returns loss and gradient (means over microbatches) and figures (sums) of a batch."""
    if count == 1:
        return gradient(active, batch, state.step_key)
    microbatches = jax.tree.map(lambda rows: split_rows(rows, count), batch)

    def add(total: Any, inputs: tuple[Any, PRNGKeyArray]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(active, *inputs)), None

    keys = jax.random.split(state.step_key, count)
    shapes = jax.eval_shape(
        gradient, active, jax.tree.map(lambda rows: rows[0], microbatches), keys[0]
    )
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    ((loss, figures), gradients), _ = jax.lax.scan(add, zeros, (microbatches, keys))
    return (loss / count, figures), jax.tree.map(lambda g: g / count, gradients)


def split_rows(rows: Array, count: int) -> Array:
    """Returns `count` microbatches; neighbours go to different ones, so no row changes device."""
    if rows.shape[0] % count:
        raise ValueError(f"{rows.shape[0]} rows: must be a multiple of accumulation={count}")
    return rows.reshape(rows.shape[0] // count, count, *rows.shape[1:]).swapaxes(0, 1)


def _updated(
    state: TrainState, gradients: Mapping[str, Values], optimiser: Optimiser, placed: Placed
) -> TrainState:
    place = placed.placement
    values, moments, ema = dict(state.values), dict(state.moments), dict(state.ema)
    for name, gradient in gradients.items():
        own = place.scattered(gradient, placed.shardings.get(name, {}))
        held = place.fetched(moments[name])
        values[name], moments[name] = optimiser.update(name, values[name], own, held, state)
        ema[name] = optimiser.average(place.fetched(ema[name]), values[name], state.step)
    return replace(state, step=state.step + 1, values=values, ema=ema, moments=moments)

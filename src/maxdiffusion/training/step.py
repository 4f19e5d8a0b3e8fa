"""One step of training: gradient (in pieces if need be), clipping, AdamW, running mean."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from maxdiffusion.training.optimiser import Optimiser
from maxdiffusion.training.parts import Values
from maxdiffusion.training.state import TrainState


class Loss(Protocol):
    """What is made small: a mean over a batch, and figures that are summed over batches."""

    def __call__(
        self, values: Mapping[str, Values], batch: Any, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Any]:
        """The loss of a batch and its figures."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a step has to say of itself."""

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]
    figures: Any


Step = Callable[[TrainState, Any], tuple[TrainState, StepReport]]


def make_step(
    loss: Loss, optimiser: Optimiser, *, trained: tuple[str, ...], accumulation: int = 1
) -> Step:
    """The step that trains the parts named `trained` and leaves the others alone.

    With `accumulation`, a batch is worked on in so many equal pieces; the result is that of the
    whole batch up to rounding and to the random draws of its pieces.
    """
    if accumulation < 1:
        raise ValueError(f"accumulation={accumulation}: must be at least 1")

    def step(state: TrainState, batch: Any) -> tuple[TrainState, StepReport]:
        active = {name: state.values[name] for name in trained}
        rest = {name: part for name, part in state.values.items() if name not in trained}

        def of_piece(values: dict[str, Values], piece: Any, key: PRNGKeyArray) -> Any:
            return loss({**rest, **values}, piece, key)

        gradient = jax.value_and_grad(of_piece, has_aux=True)
        (value, figures), gradients = _in_pieces(gradient, active, batch, state, accumulation)
        norm = optax.tree.norm(gradients)
        report = StepReport(
            loss=value,
            gradient_norm=norm,
            learning_rate=optimiser.learning_rate(state.step),
            figures=figures,
        )
        return _improved(state, optimiser.clip(gradients, norm), optimiser), report

    return step


def _in_pieces(
    gradient: Callable[..., Any],
    active: dict[str, Values],
    batch: Any,
    state: TrainState,
    count: int,
) -> Any:
    """Loss, figures and gradient of a batch; means over its pieces, figures summed."""
    if count == 1:
        return gradient(active, batch, state.step_key)
    pieces = jax.tree.map(lambda rows: split_rows(rows, count), batch)

    def add(total: Any, inputs: tuple[Any, PRNGKeyArray]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(active, *inputs)), None

    keys = jax.random.split(state.step_key, count)
    shapes = jax.eval_shape(gradient, active, jax.tree.map(lambda rows: rows[0], pieces), keys[0])
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    ((loss, figures), gradients), _ = jax.lax.scan(add, zeros, (pieces, keys))
    return (loss / count, figures), jax.tree.map(lambda g: g / count, gradients)


def split_rows(rows: Array, count: int) -> Array:
    """Rows as `count` pieces; neighbours go to different pieces, so every device keeps its own."""
    if rows.shape[0] % count:
        raise ValueError(f"{rows.shape[0]} rows: must be a multiple of accumulation={count}")
    return rows.reshape(rows.shape[0] // count, count, *rows.shape[1:]).swapaxes(0, 1)


def _improved(state: TrainState, gradients: dict[str, Values], optimiser: Optimiser) -> TrainState:
    values, moments, ema = dict(state.values), dict(state.moments), dict(state.ema)
    for name, gradient in gradients.items():
        values[name], moments[name] = optimiser.improve(
            name, values[name], gradient, moments[name], state.step
        )
        ema[name] = optimiser.average(ema[name], values[name], state.step)
    return replace(state, step=state.step + 1, values=values, ema=ema, moments=moments)

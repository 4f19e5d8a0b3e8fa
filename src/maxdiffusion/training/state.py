"""Everything that training changes, in one value that is saved and restored whole."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PRNGKeyArray

from maxdiffusion.training.optimiser import Optimiser
from maxdiffusion.training.parts import Part, Values, master


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Parameters (float32), their running mean, the moments of the optimiser, step and key.

    All but step and key are by the name of the part: `transformer`, `text_encoder`, `vae`, ...
    The key of the run never changes: a step draws from the key folded with its number.
    """

    step: Int[Array, ""]
    key: PRNGKeyArray
    values: dict[str, Values]
    ema: dict[str, Values]
    moments: dict[str, Any]

    @property
    def step_key(self) -> PRNGKeyArray:
        """The key of the next step."""
        return jax.random.fold_in(self.key, self.step)


def first_state(
    values: Mapping[str, Values], optimiser: Optimiser, *, seed: int, mesh: Mesh
) -> TrainState:
    """The state before the first step; moments and means lie where their parameters do."""

    def start(values: dict[str, Values]) -> TrainState:
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            key=jax.random.key(seed),
            values=values,
            ema=jax.tree.map(jnp.copy, values),
            moments={name: optimiser.start(part) for name, part in values.items()},
        )

    masters = {name: master(part) for name, part in values.items()}
    shardings = _like_parameters(jax.eval_shape(start, masters), masters, mesh)
    with jax.set_mesh(mesh):
        return jax.jit(start, out_shardings=shardings)(masters)


def _like_parameters(state: TrainState, values: Mapping[str, Values], mesh: Mesh) -> TrainState:
    """A sharding for every leaf: that of the parameter whose path it ends in, else whole."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    known = {
        (name, path): array.sharding
        for name, part in values.items()
        for path, array in part.items()
    }

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        sharding = known.get(tuple(keys), everywhere) if len(keys) == 2 else everywhere
        return sharding if isinstance(sharding, NamedSharding) else everywhere

    return jax.tree_util.tree_map_with_path(place, state)


def place_values(values: Mapping[str, jax.Array], part: Part[Any], mesh: Mesh) -> Values:
    """Parameters moved to where the mesh keeps them."""
    shardings = part.shardings(mesh)
    return {path: jax.device_put(value, shardings[path]) for path, value in values.items()}

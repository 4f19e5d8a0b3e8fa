"""Models taken apart: the structure on one side, the numbers that are trained on the other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from maxdiffusion.mesh import parameter_sharding
from maxdiffusion.runtime.problems import Problem, ProblemsFound

Model = TypeVar("Model", bound=nnx.Module)
Values = dict[str, jax.Array]  # dotted path -> parameter


@dataclass(frozen=True, kw_only=True)
class Part(Generic[Model]):
    """One model: its structure, and its parameters as shapes."""

    graph: nnx.GraphDef[Model]
    variables: nnx.State

    @classmethod
    def of(cls, build: Callable[[nnx.Rngs], Model]) -> "Part[Model]":
        """The part of the model that `build` makes; nothing is computed."""
        graph, variables = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
        return cls(graph=graph, variables=variables)

    def merge(self, values: Mapping[str, jax.Array]) -> Model:
        """The model with these parameters."""
        return nnx.merge(self.graph, self.state(values))

    def state(self, values: Mapping[str, jax.Array]) -> nnx.State:
        """The parameters with the structure and the words for dimensions that models have."""
        flat = nnx.to_flat_state(self.variables)
        return nnx.from_flat_state(
            [(path, variable.replace(values[dotted(path)])) for path, variable in flat]
        )

    def shardings(self, mesh: Mesh) -> dict[str, NamedSharding]:
        """Where every parameter lives on the mesh."""
        return {
            dotted(path): parameter_sharding(mesh, variable.dims, variable.shape)
            for path, variable in nnx.to_flat_state(self.variables)
        }


def values_of(state: nnx.State) -> Values:
    """The parameters of a model by their dotted paths."""
    return {dotted(path): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def dotted(path: tuple[Any, ...]) -> str:
    """A path as text."""
    return ".".join(map(str, path))


def fresh_values(build: Callable[[nnx.Rngs], nnx.Module], *, seed: int, mesh: Mesh) -> Values:
    """Parameters drawn at random, each made where it lives."""
    part: Part[nnx.Module] = Part.of(build)

    def draw() -> Values:
        return values_of(nnx.split(build(nnx.Rngs(seed)))[1])

    with jax.set_mesh(mesh):
        return jax.jit(draw, out_shardings=part.shardings(mesh))()


def check_same_shapes(found: Mapping[str, Any], wanted: Mapping[str, Any], *, name: str) -> None:
    """Raises every parameter that is missing, is too many, or has another shape."""
    problems = []
    for path in sorted({*found, *wanted}):
        here = found[path].shape if path in found else None
        there = wanted[path].shape if path in wanted else None
        if here != there:
            rule = f"has shape {there} in this model ('None' means that it has no such parameter)"
            remedy = "Continue with the config that the checkpoint was made with"
            problems.append(Problem(name=f"{name} {path}", value=here, rule=rule, remedy=remedy))
    if problems:
        raise ProblemsFound(problems)


def master(values: Mapping[str, jax.Array]) -> Values:
    """The parameters in float32, which is what an optimiser adds small steps to."""
    return {path: value.astype(jnp.float32) for path, value in values.items()}

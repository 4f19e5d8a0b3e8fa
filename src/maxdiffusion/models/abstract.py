"""Models without weights: the graph, and the shape, dtype and sharding of every parameter."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.mesh import parameter_layout, parameter_sharding

T = TypeVar("T")
Model = TypeVar("Model", bound=nnx.Module)
Values = dict[str, jax.Array]  # dotted path -> parameter
KERNEL, SCALE = "kernel", "kernel_scale"
"""Last parts of the paths of a linear map's weights, and of their scales if they have 8 bits."""


def register_tree(cls: type[T]) -> type[T]:
    """Registers a dataclass of arrays as a pytree that may also hold shapes, shardings or tracers.

    jax rebuilds a tree with such leaves in place of its arrays, so this does not call `__init__`,
    whose annotations are true of arrays only.
    """
    names = [field.name for field in fields(cast(Any, cls))]

    def flatten(tree: T) -> tuple[list[tuple[GetAttrKey, Any]], None]:
        return [(GetAttrKey(name), vars(tree)[name]) for name in names], None

    def unflatten(_: None, leaves: Iterable[Any]) -> T:
        tree = object.__new__(cls)
        vars(tree).update(zip(names, leaves, strict=True))
        return tree

    register_pytree_with_keys(cls, flatten, unflatten)
    return cls


@dataclass(frozen=True, kw_only=True)
class AbstractModel(Generic[Model]):
    """Holds a model's graph and its abstract parameters.

    AbstractModel.of(build) --on(mesh)-----> abstract parameters with shardings
                            --merge(values)-> the model with these weights
    """

    graph: nnx.GraphDef[Model]
    parameters: nnx.State

    @classmethod
    def of(cls, build: Callable[[nnx.Rngs], Model]) -> "AbstractModel[Model]":
        """Returns the model that `build` makes, without computing its weights."""
        graph, parameters = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
        return cls(graph=graph, parameters=parameters)

    def on(self, mesh: Mesh) -> nnx.State:
        """Returns the abstract parameters with their shardings and device layouts on the mesh."""
        shardings = self.shardings(mesh)

        def placed(path: str, variable: nnx.Variable) -> nnx.Variable:
            shape, dtype, sharding = variable.shape, variable.dtype, shardings[path]
            is_matrix = path.endswith(f".{KERNEL}")
            layout = parameter_layout(sharding, shape, dtype) if is_matrix else None
            where = sharding if layout is None else Format(layout, sharding)
            return variable.replace(jax.ShapeDtypeStruct(shape, dtype, sharding=where))

        flat = nnx.to_flat_state(self.parameters)
        return nnx.from_flat_state([(path, placed(dotted(path), one)) for path, one in flat])

    def shardings(self, mesh: Mesh) -> dict[str, NamedSharding]:
        """Returns the sharding of every parameter by its dotted path."""
        return {
            dotted(path): parameter_sharding(mesh, variable.dims, variable.shape)
            for path, variable in nnx.to_flat_state(self.parameters)
        }

    def state(self, values: Mapping[str, jax.Array]) -> nnx.State:
        """Returns the values as variables, with the dimension names that the model gives them."""
        flat = nnx.to_flat_state(self.parameters)
        return nnx.from_flat_state(
            [(path, variable.replace(values[dotted(path)])) for path, variable in flat]
        )

    def merge(self, values: Mapping[str, jax.Array]) -> Model:
        """Returns the model with these parameters."""
        return nnx.merge(self.graph, self.state(values))


def lay_out(state: nnx.State, wanted: nnx.State) -> None:
    """Copies the parameters of `state`, in place, to the device layouts of `wanted`.

    Those without a layout stay as they are. One is copied at a time, and the old array is freed
    before the next, so the devices hold one parameter more than before.
    """
    held = dict(nnx.to_flat_state(state))
    for path, leaf in nnx.to_flat_state(wanted):
        form = leaf.get_value().format
        if isinstance(form.layout, Layout) and path in held:
            array = held[path].get_value()
            if array.format.layout != form.layout:
                held[path].set_value(jax.block_until_ready(_copier(form)(array)))


@functools.cache
def _copier(form: Format) -> Callable[[jax.Array], jax.Array]:
    """Returns the program that copies an array to a layout; parameters of one shape share it."""
    return jax.jit(lambda array: array, out_shardings=form)


def dotted(path: tuple[Any, ...]) -> str:
    """Returns a path of a state as text, its keys joined by dots."""
    return ".".join(map(str, path))


def values_of(state: nnx.State) -> Values:
    """Returns the arrays of a state by their dotted paths."""
    return {dotted(path): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def fresh_values(build: Callable[[nnx.Rngs], nnx.Module], *, seed: int, mesh: Mesh) -> Values:
    """Returns random parameters; every device draws its own shards."""
    model: AbstractModel[nnx.Module] = AbstractModel.of(build)

    def draw() -> Values:
        return values_of(nnx.split(build(nnx.Rngs(seed)))[1])

    with jax.set_mesh(mesh):
        return jax.jit(draw, out_shardings=model.shardings(mesh))()


def check_same_shapes(found: Mapping[str, Any], wanted: Mapping[str, Any], *, name: str) -> None:
    """Raises ProblemsFound with every parameter that is missing, unknown or of another shape."""
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
    """Returns the parameters in float32, so that small optimiser updates are not rounded away."""
    return {path: value.astype(jnp.float32) for path, value in values.items()}

"""Where the state of a training is kept: shardings of the optimizer state, and memory kinds.

    parameters                     in the shardings of the model
    moments, running mean          the same, or over data and context too (ZeRO), on the device or
                                   in host memory
    an expert that is not trained  on the device, or in host memory until its next turn

With ZeRO each device updates its part of the moments, and the updates are all-gathered. Gradients
of sharded matrices are reduce-scattered over all axes, layer by layer, in any case.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.mesh.mesh import axes_size, parameter_sharding
from maxdiffusion.models.abstract import Values

T = TypeVar("T")
DEVICE, HOST = "device", "pinned_host"
ZERO_AXES = ("data", "ring", "ulysses")
"""Axes over which parameters are replicated; `fsdp` and `tensor` shard them."""
SPREAD, LIKE_WEIGHTS = "all", "weights"


@dataclass(frozen=True, kw_only=True)
class StatePlacement:
    """Says how the parts of a training state are sharded, and in which memory they are.

    `spread` shards moments and running means over data and context as well. `optimizer_memory` is
    theirs, `idle_memory` that of everything of an expert that is not trained in this step.
    """

    spread: bool = False
    optimizer_memory: str = DEVICE
    idle_memory: str = DEVICE

    def __post_init__(self) -> None:
        for name, memory in (
            ("optimizer_state_memory", self.optimizer_memory),
            ("idle_expert_memory", self.idle_memory),
        ):
            if memory not in (DEVICE, HOST):
                raise ValueError(f"{name}={memory!r}: must be {DEVICE!r} or {HOST!r}")

    @property
    def parks(self) -> bool:
        """Returns whether the experts take turns on the device."""
        return self.idle_memory != DEVICE

    def describe(self, moments: str) -> str:
        """Returns the line of the start-up report; `moments` is their format."""
        how = "over data and context too" if self.spread else "as the weights"
        line = f"optimizer state: {moments} moments, sharded {how}, in {self.optimizer_memory}"
        return f"{line}; experts take turns on the device" if self.parks else line

    def check(self, mesh: Mesh) -> None:
        """Raises ProblemsFound if the devices have no such memory."""
        if {self.optimizer_memory, self.idle_memory} == {DEVICE}:
            return
        device = mesh.devices.flat[0]
        kinds = frozenset(memory.kind for memory in device.addressable_memories())
        problems = self.missing(kinds, device.device_kind)
        if problems:
            raise ProblemsFound(problems)

    def missing(self, kinds: frozenset[str], device: str) -> list[Problem]:
        """Returns a problem for every memory that a kind of device with these does not have."""
        return [
            Problem(
                name=name,
                value=memory,
                rule=f"devices of this kind ({device}) have {', '.join(sorted(kinds))}",
                remedy=f"Use {name}={DEVICE}",
            )
            for name, memory in (
                ("optimizer_state_memory", self.optimizer_memory),
                ("idle_expert_memory", self.idle_memory),
            )
            if memory not in kinds
        ]

    def of_parameter(self, sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
        """Returns the sharding of a moment, given the one of its parameter."""
        return spread_over(sharding, shape) if self.spread else sharding

    def of_optimizer(self, sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
        """Returns the sharding of a stored moment or running mean, with its memory."""
        placed = self.of_parameter(sharding, shape)
        return placed if self.optimizer_memory == DEVICE else placed.with_memory_kind(HOST)

    def scattered(self, gradients: Values, shardings: Mapping[str, NamedSharding]) -> Values:
        """Returns gradients in the shardings that their moments are updated in."""
        if not self.spread:
            return gradients
        return {
            path: jax.lax.with_sharding_constraint(g, spread_over(shardings[path], g.shape))
            for path, g in gradients.items()
        }

    def fetched(self, tree: T) -> T:
        """Returns stored arrays in device memory; inside of a compiled step."""
        if self.optimizer_memory == DEVICE:
            return tree
        return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)


def spread_over(
    sharding: NamedSharding, shape: Sequence[int], axes: Sequence[str] = ZERO_AXES
) -> NamedSharding:
    """Returns a sharding over more axes of the mesh, as many as divide one of the dimensions.

    The dimension that takes most devices gets them, of equals one that is sharded already (a sum
    over all axes is then one reduce-scatter), else the first. Axes that a sharding already uses,
    and those of one device, are left out.
    """
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    spec = [_axes(entry) for entry in sharding.spec] + [()] * (len(shape) - len(sharding.spec))
    used = {axis for entry in spec for axis in entry}
    free = [axis for axis in axes if axis not in used and mesh.shape[axis] > 1]
    best: tuple[int, int, tuple[str, ...]] = (1, 0, ())
    for dim, size in sorted(enumerate(shape), key=lambda one: axes_size(mesh, spec[one[0]]) == 1):
        for count in range(len(free), 0, -1):
            more = tuple(free[:count])
            held = axes_size(mesh, (*spec[dim], *more))
            if size % held == 0:
                found = (axes_size(mesh, more), dim, more)
                best = found if found[0] > best[0] else best
                break
    _, dim, more = best
    if more:
        spec[dim] = (*spec[dim], *more)
    return NamedSharding(mesh, PartitionSpec(*(entry or None for entry in spec)))


LayerStep = Callable[..., tuple[jax.Array, Any]]  # (tokens, (weights, ...)) -> (tokens, ...)


def with_scattered_gradients(step: LayerStep, mesh: Mesh) -> LayerStep:
    """Returns the step of a layer, with the gradients of its sharded matrices reduce-scattered.

    Batch and tokens are split over data, fsdp and context, matrices over fsdp alone. XLA sums such
    a gradient by an all-reduce over all of these axes and keeps a slice: twice the bytes, and the
    whole matrix on every device. Where the result is split over the same axes as the sum, it is a
    reduce-scatter.
    """
    if mesh.size == 1:
        return step

    def scattered(tokens: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        layer, *rest = inputs
        flat = [
            (path, one.replace(_scattered(one[...], one.dims, mesh)))
            for path, one in nnx.to_flat_state(layer)
        ]
        return step(tokens, (nnx.from_flat_state(flat), *rest))

    return scattered


def _scattered(weight: jax.Array, dims: tuple[str, ...], mesh: Mesh) -> jax.Array:
    own = parameter_sharding(mesh, dims, weight.shape)
    if own.is_fully_replicated:
        return weight
    return _gradient_in(spread_over(own, weight.shape), weight)


def gradient_bytes(values: Mapping[str, Any]) -> int:
    """Returns the bytes of the float32 gradients of (abstract) parameters on one device.

    Those of sharded matrices of blocks, which are stacked, are split over all axes.
    """

    def placed(path: str, leaf: Any) -> NamedSharding:
        own: NamedSharding = leaf.sharding
        in_block = path.startswith("blocks.") and not own.is_fully_replicated
        return spread_over(own, leaf.shape) if in_block else own

    return sum(
        4 * math.prod(placed(path, leaf).shard_shape(leaf.shape)) for path, leaf in values.items()
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradient_in(sharding: NamedSharding, weight: jax.Array) -> jax.Array:
    """Returns the weight; its gradient gets a sharding."""
    return weight


_gradient_in.defvjp(
    lambda sharding, weight: (weight, None),
    lambda sharding, _, gradient: (jax.lax.with_sharding_constraint(gradient, sharding),),
)


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def state_shardings(
    state: T, parameters: Mapping[str, Mapping[str, Any]], mesh: Mesh, placement: StatePlacement
) -> T:
    """Returns a sharding for every leaf of an abstract state.

    Leaves under `ema` and `moments` that belong to a parameter get that of the optimizer state,
    other leaves of a parameter its own, and the rest is replicated. `parameters` have shardings.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        own = parameters.get(keys[0], {}).get(keys[1]) if len(keys) == 2 else None
        if own is None or not isinstance(own.sharding, NamedSharding):
            return everywhere
        fitting = fitted(own.sharding, leaf.shape)
        if path[0].name == "values":
            return fitting
        return placement.of_optimizer(fitting, leaf.shape)

    placed: T = jax.tree_util.tree_map_with_path(place, state)
    return placed


def fitted(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """Returns the sharding for an array whose dimensions may be shorter, such as block scales."""
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    entries = [
        entry if size % axes_size(mesh, _axes(entry)) == 0 else None
        for entry, size in zip(sharding.spec, shape, strict=False)
    ]
    return NamedSharding(mesh, PartitionSpec(*entries))


def in_memory(tree: T, memory: str) -> T:
    """Returns the arrays in a memory; those that are there already stay as they are."""

    def where(leaf: Any) -> Any:
        sharding = leaf.sharding
        return sharding if _kind(sharding) == memory else sharding.with_memory_kind(memory)

    return moved(tree, jax.tree.map(where, tree))


def moved(tree: T, shardings: Any) -> T:
    """Returns the arrays in other shardings; the old ones are deleted, as if they were donated.

    jax cannot donate a buffer to another memory, and callers may still refer to the old arrays.
    """

    def move(leaf: Any, sharding: Any) -> Any:
        if leaf.sharding == sharding:
            return leaf
        there = jax.block_until_ready(jax.device_put(leaf, sharding))
        leaf.delete()
        return there

    placed: T = jax.tree.map(move, tree, shardings)
    return placed


def _kind(sharding: Any) -> str:
    return sharding.memory_kind or DEVICE


def bytes_on_device(tree: Any, memory: str = DEVICE) -> int:
    """Returns the bytes of (abstract) arrays that one device keeps in a memory."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if _kind(leaf.sharding) == memory
    )

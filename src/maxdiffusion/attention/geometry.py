"""How the sizes of a problem fall on a mesh: local sizes, padding, and partition specs."""

import math
from dataclasses import dataclass

from jax.sharding import Mesh, PartitionSpec

from maxdiffusion.attention.problem import AttentionProblem
from maxdiffusion.mesh import AXES, CONTEXT_AXES
from maxdiffusion.mesh.axes import MeshShape
from maxdiffusion.runtime.problems import Problem

BATCH_AXES = ("data", "fsdp")
TILE_ROWS = 8
MOST_PADDING = 0.01


def mesh_shape(mesh: Mesh) -> MeshShape:
    """The sizes of the five axes of `mesh`, which must have exactly those."""
    if tuple(sorted(mesh.axis_names)) != tuple(sorted(AXES)):
        raise ValueError(f"mesh axes {mesh.axis_names}: attention needs the axes {AXES}")
    return MeshShape(**dict(mesh.shape))


def divisors(number: int) -> list[int]:
    """Every whole number that divides `number`."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def even_length(length: int, devices: int) -> int:
    """The shortest length at least `length` that splits evenly and, if cheap, in whole tiles.

    Tokens lie on the rows of a TPU's tiles. Where a device's share is whole tiles, shares join and
    part without a copy: for 75,600 tokens on 8 devices 6 more each save every layout copy of an
    exchange.
    """
    if devices == 1:
        return length
    share = math.ceil(length / devices)
    tiled = math.ceil(share / TILE_ROWS) * TILE_ROWS
    cheap = tiled - share <= share * MOST_PADDING
    return (tiled if cheap else share) * devices


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A problem on a mesh; `shared_keys` says that k and v lie whole on every context device."""

    problem: AttentionProblem
    shape: MeshShape
    shared_keys: bool = False

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes the batch is split over; fsdp only where it divides what data leaves."""
        if self.problem.batch % (self.shape.data * self.shape.fsdp) == 0:
            return BATCH_AXES
        return ("data",)

    @property
    def local_batch(self) -> int:
        """Batch elements on one device."""
        shards = math.prod(vars(self.shape)[axis] for axis in self.batch_axes)
        return math.ceil(self.problem.batch / shards)

    @property
    def local_heads(self) -> int:
        """Heads of one tensor shard."""
        return math.ceil(self.problem.heads / self.shape.tensor)

    @property
    def padded_q_len(self) -> int:
        """Query length that every context device gets an equal share of."""
        return even_length(self.problem.q_len, self.shape.context)

    @property
    def padded_kv_len(self) -> int:
        """Key length that every context device gets an equal share of, or all of if shared."""
        if self.shared_keys:
            return self.problem.kv_len
        return even_length(self.problem.kv_len, self.shape.context)

    @property
    def q_spec(self) -> PartitionSpec:
        """Where queries and the output lie."""
        return PartitionSpec(self.batch_axes, CONTEXT_AXES, "tensor", None)

    @property
    def kv_spec(self) -> PartitionSpec:
        """Where keys and values lie."""
        tokens = None if self.shared_keys else CONTEXT_AXES
        return PartitionSpec(self.batch_axes, tokens, "tensor", None)

    @property
    def gathered_spec(self) -> PartitionSpec:
        """Where keys and values lie once every context device has all of them."""
        return PartitionSpec(self.batch_axes, None, "tensor", None)

    @property
    def mask_spec(self) -> PartitionSpec:
        """Where a key mask lies: its rows with the batch, all of its keys on every device."""
        return PartitionSpec(self.batch_axes, None)

    def problems(self) -> list[Problem]:
        """What keeps this problem from being split over this mesh."""
        found = []
        if self.problem.batch % self.shape.data:
            found.append(
                Problem(
                    name="batch",
                    value=self.problem.batch,
                    rule=f"the data axis ({self.shape.data}) must divide it",
                    remedy=f"Use a data axis of one of {divisors(self.problem.batch)}, "
                    "or a batch that it divides",
                )
            )
        if self.problem.heads % self.shape.tensor:
            found.append(
                Problem(
                    name="heads",
                    value=self.problem.heads,
                    rule=f"the tensor axis ({self.shape.tensor}) must divide them",
                    remedy=f"Use a tensor axis of one of {divisors(self.problem.heads)}",
                )
            )
        if self.problem.heads % self.problem.key_heads:
            found.append(
                Problem(
                    name="kv_heads",
                    value=self.problem.key_heads,
                    rule=f"must divide heads={self.problem.heads}",
                    remedy=f"Use one of {divisors(self.problem.heads)}",
                )
            )
        return found

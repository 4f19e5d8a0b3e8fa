"""Context-parallel schemes: which collectives run around the kernel calls of one attention.

A scheme is a value in two states. A row of the registry holds it without degrees. `for_mesh`
returns it with the degrees of a mesh, or a simpler scheme where a degree is 1. The resolved value
runs on the shards of one device inside shard_map, and states its collectives for start-up reports,
cost estimates and tests.
"""

import abc
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, final

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from maxdiffusion.attention.backends import AnyBackend, LocalReducer
from maxdiffusion.attention.backends.base import Keys, Queries
from maxdiffusion.attention.options import AttentionOptions
from maxdiffusion.attention.problem import AttentionProblem, KVMask, LocalProblem, axes_size
from maxdiffusion.kernels.qk_prep import HeadLayout, QKVLayout
from maxdiffusion.mesh import CONTEXT_AXES
from maxdiffusion.runtime.timing import COLLECTIVE_SCOPE

ScatteredHeads = Sequence[Float[Array, "_U _S _D"]]
"""Heads as columns of one array per group, with a block of rows for each target device."""
CollectiveKind = Literal["all-gather", "all-to-all", "collective-permute", "all-reduce"]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Collectives of one kind in the forward pass of one attention.

    count        operations in the compiled program
    bytes        sent by the busiest device in all of them
    rounds       steps that follow each other; operations of a step run together
    round_bytes  array bytes of one round on a device; of an all-gather those of the result
    overlap      kernel calls that run during a round
    hidden       share of the rounds that other work hides completely
    wraps        whether a permutation closes to a ring; otherwise it sends both ways along a line
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    count: int
    bytes: int
    rounds: int
    round_bytes: int
    overlap: float = 0.0
    hidden: float = 0.0
    wraps: bool = True


class Partitioning(enum.Enum):
    """Partitioner of the arrays: our code inside shard_map, or XLA from sharding constraints."""

    MANUAL = "shard_map"
    AUTO = "XLA"


class ContextParallel(abc.ABC):
    """Base of all schemes; a subclass is final and overrides at least the abstract methods.

    `attend` sees the shards of one device (with `Partitioning.AUTO` the global arrays).
    """

    partitioning: ClassVar[Partitioning] = Partitioning.MANUAL
    num_relayouts: ClassVar[int] = 0
    """Arrays of q, k, v and the output that are read and written once more in HBM."""

    def for_mesh(self, problem: AttentionProblem, options: AttentionOptions) -> "ContextParallel":
        """Returns this scheme with the degrees of `problem.mesh`."""
        return self

    def for_replicated_kv(
        self, problem: AttentionProblem, options: AttentionOptions
    ) -> "ContextParallel":
        """Returns the scheme for keys of which every device has all, as those of a text."""
        return LocalKV()

    @abc.abstractmethod
    def attend(
        self, q: Queries, k: Keys, v: Keys, *, kv_mask: KVMask, backend: AnyBackend
    ) -> Queries:
        """Returns the attention of this device's queries over all keys."""

    @abc.abstractmethod
    def local_problem(self, shard: LocalProblem) -> LocalProblem:
        """Returns the sizes of the kernel calls, given what a device holds before collectives."""

    @abc.abstractmethod
    def title(self) -> str:
        """Returns what is sent, in a few words."""

    def collectives(
        self, shard: LocalProblem, reductions: Sequence[int] = ()
    ) -> tuple[Collective, ...]:
        """Returns the collectives of one attention; by default there are none.

        `reductions` are the all-reduces of key statistics that the backend asks for, in bytes per
        (batch, head) pair.
        """
        return ()

    def padding(self, shard: LocalProblem) -> str:
        """Returns what else than tokens is padded, for the start-up report."""
        return ""

    def attend_groups(
        self, queries: Sequence[Queries], k: Keys, v: Keys, *, kv_mask: KVMask, backend: AnyBackend
    ) -> list[Queries]:
        """Returns the attention of several groups of queries over the same keys."""
        return [self.attend(q, k, v, kv_mask=kv_mask, backend=backend) for q in queries]

    def layout(self, batch: int, heads: int) -> QKVLayout:
        """Returns the head layout of `attend_scattered`; by default no head moves."""
        return QKVLayout.alike(HeadLayout.identity(batch, heads))

    def attend_scattered(
        self,
        q: ScatteredHeads,
        k: ScatteredHeads,
        v: ScatteredHeads,
        *,
        kv_mask: KVMask,
        backend: AnyBackend,
    ) -> ScatteredHeads:
        """Returns the attention of heads that are in `layout` already, in the same layout."""
        heads = [x.reshape(*x.shape[:2], -1, backend.problem.head_dim) for (x,) in (q, k, v)]
        outs = self.attend_groups(heads[:1], *heads[1:], kv_mask=kv_mask, backend=backend)
        return [out.reshape(*out.shape[:2], -1) for out in outs]


def gathered(shard: LocalProblem) -> LocalProblem:
    """Returns the sizes on a device that has all keys."""
    return replace(shard, kv_len=shard.kv_len * shard.num_kv_shards, num_kv_shards=1)


def gather_collectives(
    axes: tuple[str, ...], degree: int, shard: LocalProblem
) -> tuple[Collective, ...]:
    """Returns the all-gathers of k and v over `degree` devices."""
    return (
        Collective(
            kind="all-gather",
            axes=axes,
            count=2,
            bytes=2 * (degree - 1) * shard.kv_bytes,
            rounds=2,
            round_bytes=degree * shard.kv_bytes,
        ),
    )


@final
@dataclass(frozen=True)
class LocalKV(ContextParallel):
    """Sends nothing: this device has all the keys that its queries need."""

    def attend(
        self, q: Queries, k: Keys, v: Keys, *, kv_mask: KVMask, backend: AnyBackend
    ) -> Queries:
        """Returns the backend's attention over the local keys."""
        return self.attend_groups([q], k, v, kv_mask=kv_mask, backend=backend)[0]

    def attend_groups(
        self, queries: Sequence[Queries], k: Keys, v: Keys, *, kv_mask: KVMask, backend: AnyBackend
    ) -> list[Queries]:
        """Returns the attention of each group, with one call of the backend each."""
        mask = kv_mask.whole()
        outs = []
        with jax.named_scope("kernel"):
            k, stats = backend.preprocess_kv(k, v, mask, LocalReducer())
            for q in queries:
                outs.append(backend.attend(q, k, v, mask, backend.preprocess_q(q, stats)))
        return outs

    def local_problem(self, shard: LocalProblem) -> LocalProblem:
        """Returns local queries and all keys."""
        return gathered(shard)

    def title(self) -> str:
        """Returns what is sent, in a few words."""
        return "none (keys are local)"


@dataclass(frozen=True, kw_only=True)
class SplitKV(ContextParallel):
    """Base of the schemes that send keys and values over the `degree` devices of `axes`."""

    axes: tuple[str, ...] = CONTEXT_AXES
    degree: int = 1

    def for_mesh(self, problem: AttentionProblem, options: AttentionOptions) -> ContextParallel:
        """Returns this scheme with its degree, or `LocalKV` for a degree of 1."""
        degree = axes_size(problem.mesh, self.axes)
        return LocalKV() if degree == 1 else replace(self, degree=degree)


@final
@dataclass(frozen=True, kw_only=True)
class AllGatherKV(SplitKV):
    """Gathers all keys and values on every device, which then attends alone."""

    def attend(
        self, q: Queries, k: Keys, v: Keys, *, kv_mask: KVMask, backend: AnyBackend
    ) -> Queries:
        """Returns the attention of this device's queries over the gathered keys."""
        with jax.named_scope(COLLECTIVE_SCOPE):
            k, v = (jax.lax.all_gather(part, self.axes, axis=1, tiled=True) for part in (k, v))
        return LocalKV().attend(q, k, v, kv_mask=kv_mask, backend=backend)

    def local_problem(self, shard: LocalProblem) -> LocalProblem:
        """Returns local queries and all keys."""
        return gathered(shard)

    def collectives(
        self, shard: LocalProblem, reductions: Sequence[int] = ()
    ) -> tuple[Collective, ...]:
        """Returns the all-gathers of k and of v."""
        return gather_collectives(self.axes, self.degree, shard)

    def title(self) -> str:
        """Returns what is sent, in a few words."""
        return f"k, v gathered over {'x'.join(self.axes)}={self.degree}"


@final
@dataclass(frozen=True, kw_only=True)
class AutoSharded(ContextParallel):
    """Constrains q to stay split and k, v to be replicated; XLA inserts the collectives."""

    partitioning: ClassVar[Partitioning] = Partitioning.AUTO

    q_spec: PartitionSpec = field(default_factory=PartitionSpec)
    kv_spec: PartitionSpec = field(default_factory=PartitionSpec)
    degree: int = 1
    num_devices: int = 1

    def for_mesh(self, problem: AttentionProblem, options: AttentionOptions) -> ContextParallel:
        """Returns this scheme with the shardings of `problem`."""
        return AutoSharded(
            q_spec=problem.q_spec,
            kv_spec=problem.gathered_spec,
            degree=problem.shard.num_kv_shards,
            num_devices=problem.mesh.devices,
        )

    def for_replicated_kv(
        self, problem: AttentionProblem, options: AttentionOptions
    ) -> ContextParallel:
        """Returns this scheme with the shardings of `problem`."""
        return self.for_mesh(problem, options)

    def attend(
        self, q: Queries, k: Keys, v: Keys, *, kv_mask: KVMask, backend: AnyBackend
    ) -> Queries:
        """Returns the attention of global arrays."""
        q = self._constrain(q, self.q_spec)
        k, v = (self._constrain(part, self.kv_spec) for part in (k, v))
        out = LocalKV().attend(q, k, v, kv_mask=kv_mask, backend=backend)
        return self._constrain(out, self.q_spec)

    def _constrain(self, array: Array, spec: PartitionSpec) -> Array:
        if self.num_devices == 1:
            return array
        constrained: Array = jax.lax.with_sharding_constraint(array, spec)
        return constrained

    def local_problem(self, shard: LocalProblem) -> LocalProblem:
        """Returns local queries and all keys."""
        return gathered(shard)

    def collectives(
        self, shard: LocalProblem, reductions: Sequence[int] = ()
    ) -> tuple[Collective, ...]:
        """Returns the all-gathers of k and v, where keys are split."""
        if self.degree == 1:
            return ()
        return gather_collectives(CONTEXT_AXES, self.degree, shard)

    def title(self) -> str:
        """Returns what is sent, in a few words."""
        return "left to XLA"

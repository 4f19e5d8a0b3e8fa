"""Context-parallel schemes: which collectives run around the kernel calls of one attention.

A scheme is a value in two states. A row of the registry holds it without degrees. `for_mesh`
returns it with the degrees of a mesh, or a simpler scheme where a degree is 1. The resolved value
runs on the shards of one device inside shard_map, and states its collectives, forward and backward,
for start-up reports, cost estimates and tests.

Gradients: jax transposes the collectives that only move arrays (all-to-all, all-gather). A scheme
that calls kernels is a `KernelScheme`: it has one gradient for all its calls, which needs the
outputs and their log-sums and runs no forward kernel again.
"""

import abc
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, final

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from maxdiffusion.attention.backends import AnyBackend, LocalReducer
from maxdiffusion.attention.backends.base import (
    ATTENTION_LOG_SUM,
    ATTENTION_OUT,
    Delta,
    Keys,
    LogSum,
    PreparedKeys,
    Queries,
)
from maxdiffusion.attention.options import AttentionOptions
from maxdiffusion.attention.problem import (
    AttentionProblem,
    KVMask,
    LocalKVMask,
    LocalProblem,
    axes_size,
)
from maxdiffusion.kernels.qk_prep import HeadLayout, QKVLayout
from maxdiffusion.mesh import CONTEXT_AXES
from maxdiffusion.runtime.timing import COLLECTIVE_SCOPE

ScatteredHeads = Sequence[Float[Array, "_U _S _D"]]
"""Heads as columns of one array per group, with a block of rows for each target device."""
CollectiveKind = Literal[
    "all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter"
]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Collectives of one kind in the forward pass of one attention, or in the backward pass.

    count        operations in the compiled program
    bytes        sent by the busiest device in all of them
    rounds       steps that follow each other; operations of a step run together
    round_bytes  array bytes of one round on a device; of an all-gather those of the result
    overlap      kernel calls (of the same pass) that run during a round
    hidden       share of the rounds that other work hides completely
    wraps        whether a permutation closes to a ring; otherwise it sends both ways along a line
    counter      axes along which every other ring of a permutation turns the other way round
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
    counter: tuple[str, ...] = ()


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
        return LocalKV(replicas=problem.mesh.context)

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

    def backward_collectives(self, shard: LocalProblem) -> tuple[Collective, ...]:
        """Returns the collectives that the gradient of one attention adds; by default none."""
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

    def send_keys(self, scattered: ScatteredHeads) -> ScatteredHeads:
        """Returns keys or values, in `layout`, as `attend_scattered` takes them."""
        return scattered

    def attend_scattered(
        self,
        q: ScatteredHeads,
        k: ScatteredHeads,
        v: ScatteredHeads,
        *,
        kv_mask: KVMask,
        backend: AnyBackend,
    ) -> ScatteredHeads:
        """Returns the attention of heads that are in `layout` already, in the same layout.

        Keys and values went through `send_keys`.
        """
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


Mask = Bool[Array, "B _"]


class Saved(NamedTuple):
    """Arrays that the gradient of an attention needs; `k` as the kernels saw it."""

    queries: tuple[Queries, ...]
    k: PreparedKeys
    v: Keys
    mask: Mask | None
    outs: tuple[Queries, ...]
    log_sums: tuple[LogSum, ...]


class OutputGradient(NamedTuple):
    """A group of queries, the gradient of its output, and two sums per query.

    `log_sum` is that of the scores of all keys, `delta` is sum(out * d_out) over head features.
    With these, the gradient of q, k and v is a sum of independent parts, one for each pair of a
    group of queries and a shard of keys.
    """

    q: Queries
    d_out: Queries
    log_sum: LogSum
    delta: Delta


Gradients = tuple[list[Queries], Keys, Keys]


class Result(enum.Enum):
    """Result of a group of queries: the output, or a pair of output and natural log-sum."""

    OUTPUT = "output"
    OUTPUT_AND_LOG_SUM = "output and log-sum"


class Ran(NamedTuple):
    """The results of all groups of queries, and the keys as the kernels saw them."""

    results: tuple[Any, ...]
    k: PreparedKeys


class KernelScheme(ContextParallel):
    """Base of the schemes that call kernels: one gradient for all groups of queries at once."""

    def attend(
        self, q: Queries, k: Keys, v: Keys, *, kv_mask: KVMask, backend: AnyBackend
    ) -> Queries:
        """Returns the attention of this device's queries over all keys."""
        return self.attend_groups([q], k, v, kv_mask=kv_mask, backend=backend)[0]

    def attend_groups(
        self, queries: Sequence[Queries], k: Keys, v: Keys, *, kv_mask: KVMask, backend: AnyBackend
    ) -> list[Queries]:
        """Returns the attention of several groups of queries over the same keys."""
        mask, lengths = kv_mask.mask, kv_mask.with_mask(None)
        # `run` itself, not a function around it, so that the way to a kernel stays short.
        run = partial(self.run, lengths=lengths, backend=backend, result=Result.OUTPUT)
        if not backend.has_shard_gradients:
            return [*run(queries, k, v, mask).results]
        differentiable = jax.custom_vjp(run)
        differentiable.defvjp(*self._gradient(lengths, backend))
        return [*differentiable(tuple(queries), k, v, mask).results]

    @abc.abstractmethod
    def run(
        self,
        queries: Sequence[Queries],
        k: Keys,
        v: Keys,
        mask: Mask | None,
        *,
        lengths: KVMask,
        backend: AnyBackend,
        result: Result,
    ) -> Ran:
        """Returns the result of each group of queries; `mask` belongs to the keys of `lengths`.

        Prepared keys may differ from `k` by a vector that all keys share. It moves every score of
        a row alike, so that the gradients of q and of `k` are those for the prepared keys.
        """

    @abc.abstractmethod
    def gradients(
        self,
        groups: Sequence[OutputGradient],
        k: PreparedKeys,
        v: Keys,
        *,
        kv_mask: KVMask,
        backend: AnyBackend,
    ) -> Gradients:
        """Returns the gradients of the queries of each group, and of this device's k and v."""

    def _gradient(
        self, lengths: KVMask, backend: AnyBackend
    ) -> tuple[Callable[..., tuple[Ran, Saved]], Callable[..., tuple[Any, ...]]]:
        """Returns the forward and the backward function of `run`."""

        def forward(
            queries: tuple[Queries, ...], k: Keys, v: Keys, mask: Mask | None
        ) -> tuple[Ran, Saved]:
            kind = Result.OUTPUT_AND_LOG_SUM
            ran = self.run(queries, k, v, mask, lengths=lengths, backend=backend, result=kind)
            outs = tuple(_kept(out) for out, _ in ran.results)
            log_sums = tuple(checkpoint_name(rows, ATTENTION_LOG_SUM) for _, rows in ran.results)
            return Ran(outs, ran.k), Saved(queries, ran.k, v, mask, outs, log_sums)

        def backward(saved: Saved, gradient: Ran) -> tuple[tuple[Queries, ...], Keys, Keys, None]:
            # Prepared keys are returned for this function alone: they have no gradient.
            groups = [
                output_gradient(*group)
                for group in zip(
                    saved.queries, saved.outs, saved.log_sums, gradient.results, strict=True
                )
            ]
            keys = lengths.with_mask(saved.mask)
            d_queries, d_k, d_v = self.gradients(
                groups, saved.k, saved.v, kv_mask=keys, backend=backend
            )
            dtype = saved.v.dtype
            d_queries = [d_q.astype(dtype) for d_q in d_queries]
            return tuple(d_queries), d_k.astype(dtype), d_v.astype(dtype), None

        return forward, backward


def _kept(out: Queries) -> Queries:
    """Returns an output, named with its heads side by side.

    As [S, N, H] a stack of kept outputs has few heads in each tile and is slow to write and read:
    2 % of the work of a layer outside of kernels (docs/design/training_step.md).
    """
    named: Array = checkpoint_name(out.reshape(*out.shape[:2], -1), ATTENTION_OUT)
    return named.reshape(out.shape)


def output_gradient(q: Queries, out: Queries, log_sum: LogSum, d_out: Queries) -> OutputGradient:
    """Returns a group of queries with its sums."""
    products = out.astype(jnp.float32) * d_out.astype(jnp.float32)
    return OutputGradient(q, d_out, log_sum, jnp.sum(products, axis=-1))


def local_gradients(
    groups: Sequence[OutputGradient],
    k: PreparedKeys,
    v: Keys,
    mask: LocalKVMask,
    backend: AnyBackend,
) -> Gradients:
    """Returns the gradients of groups of queries and of some keys, in float32."""
    d_queries: list[Queries] = []
    d_k, d_v = (jnp.zeros(v.shape, jnp.float32) for _ in range(2))
    for group in groups:
        with jax.named_scope("kernel"):
            parts = backend.gradients(group.q, k, v, mask, group.log_sum, group.delta, group.d_out)
        d_q, more_k, more_v = (part.astype(jnp.float32) for part in parts)
        d_queries.append(d_q)
        d_k, d_v = d_k + more_k, d_v + more_v
    return d_queries, d_k, d_v


@final
@dataclass(frozen=True, kw_only=True)
class LocalKV(KernelScheme):
    """Sends nothing: this device has all the keys that its queries need.

    `replicas` devices along `CONTEXT_AXES` hold the same keys (those of a text), whose gradients
    are summed over them.
    """

    replicas: int = 1

    def run(
        self,
        queries: Sequence[Queries],
        k: Keys,
        v: Keys,
        mask: Mask | None,
        *,
        lengths: KVMask,
        backend: AnyBackend,
        result: Result,
    ) -> Ran:
        """Returns the result of each group, with one call of the backend each."""
        keys = lengths.with_mask(mask).whole()
        results: list[Any] = []
        with jax.named_scope("kernel"):
            k, kv_stats = backend.preprocess_kv(k, v, keys, LocalReducer())
            for q in queries:
                stats = backend.preprocess_q(q, kv_stats)
                if result is Result.OUTPUT:
                    results.append(backend.attend(q, k, v, keys, stats))
                else:
                    results.append(backend.finalize_with_log_sum(q, k, v, keys, stats, None))
        return Ran(tuple(results), k)

    def gradients(
        self,
        groups: Sequence[OutputGradient],
        k: PreparedKeys,
        v: Keys,
        *,
        kv_mask: KVMask,
        backend: AnyBackend,
    ) -> Gradients:
        """Returns the gradients, with one call of the backend for each group."""
        return local_gradients(groups, k, v, kv_mask.whole(), backend)

    def local_problem(self, shard: LocalProblem) -> LocalProblem:
        """Returns local queries and all keys."""
        return gathered(shard)

    def backward_collectives(self, shard: LocalProblem) -> tuple[Collective, ...]:
        """Returns the all-reduce of the gradients of replicated keys and values."""
        if self.replicas == 1:
            return ()
        return (summed_gradients(CONTEXT_AXES, self.replicas, shard),)

    def title(self) -> str:
        """Returns what is sent, in a few words."""
        return "none (keys are local)"


def summed_gradients(axes: tuple[str, ...], degree: int, shard: LocalProblem) -> Collective:
    """Returns the all-reduce of the gradients of k and v, which XLA makes one of."""
    array = 2 * shard.kv_bytes
    return Collective(
        kind="all-reduce",
        axes=axes,
        count=1,
        bytes=2 * array * (degree - 1) // degree,
        rounds=1,
        round_bytes=array,
    )


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

    def backward_collectives(self, shard: LocalProblem) -> tuple[Collective, ...]:
        """Returns the reduce-scatters of the gradients of k and of v."""
        return (
            Collective(
                kind="reduce-scatter",
                axes=self.axes,
                count=2,
                bytes=2 * (self.degree - 1) * shard.kv_bytes,
                rounds=2,
                round_bytes=shard.kv_bytes,
            ),
        )

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
    context: int = 1
    num_devices: int = 1

    def for_mesh(self, problem: AttentionProblem, options: AttentionOptions) -> ContextParallel:
        """Returns this scheme with the shardings of `problem`."""
        return AutoSharded(
            q_spec=problem.q_spec,
            kv_spec=problem.gathered_spec,
            degree=problem.shard.num_kv_shards,
            context=problem.mesh.context,
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

    def backward_collectives(self, shard: LocalProblem) -> tuple[Collective, ...]:
        """Returns the all-reduce of the gradients of k and v, where queries are split."""
        if self.context == 1:
            return ()
        return (summed_gradients(CONTEXT_AXES, self.context, gathered(shard)),)

    def title(self) -> str:
        """Returns what is sent, in a few words."""
        return "left to XLA"

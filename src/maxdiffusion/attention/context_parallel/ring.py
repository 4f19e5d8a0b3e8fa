"""Ring attention: k and v rotate over the devices, and partial attentions are merged.

In the backward pass keys stay and queries rotate: a hop sends q and d_out, two numbers per query,
and the gradient of q as far as it is summed. Per element and hop that is 2 + 2 + 4 bytes with
bfloat16 inputs. Keys would travel with two gradients, 2 + 2 + 4 + 4 bytes. Sums travel in float32:
R - 1 roundings to bfloat16 would weigh more than the one that the gradient ends with. A backward
kernel takes 2.5 times as long as a forward one (5 products for 2), a hop 2 times as long.

    device i   [own queries]  [of i - 1]  [of i - 2] ... [of i + 1]
    links      q, d_out ----  ----------  ----------
                                    d_q   ----------      --------- home
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from maxdiffusion.attention.backends import AnyBackend, Reducer
from maxdiffusion.attention.backends.base import Keys, PreparedKeys, Queries
from maxdiffusion.attention.context_parallel.base import (
    Collective,
    ContextParallel,
    Gradients,
    KernelScheme,
    Mask,
    OutputGradient,
    Ran,
    Result,
    SplitKV,
    local_gradients,
)
from maxdiffusion.attention.options import AttentionOptions
from maxdiffusion.attention.problem import (
    AttentionProblem,
    KVMask,
    LocalKVMask,
    LocalProblem,
    axes_size,
)
from maxdiffusion.runtime.timing import COLLECTIVE_SCOPE

Steps = list[tuple[int, int]]
FLOAT32_BYTES = 4


@jax.named_scope(COLLECTIVE_SCOPE)
def ppermute_columns(
    x: Shaped[Array, "B T N H"], axes: tuple[str, ...], steps: Steps
) -> Shaped[Array, "B T N H"]:
    """Returns the `x` that arrives when every device sends its own along `steps`, as columns.

    A [N, H] tile of a few heads would be padded, and transposed on both ends of the hop.
    """
    arrived: Array = jax.lax.ppermute(x.reshape(*x.shape[:2], -1), axes, steps)
    return arrived.reshape(x.shape)


def reduction_collectives(
    axes: tuple[str, ...], degree: int, shard: LocalProblem, reductions: Sequence[int]
) -> tuple[Collective, ...]:
    """Returns the all-reduces of key statistics over the devices of a ring.

    They are a few bytes per head; the projection of the queries hides them.
    """
    if not reductions:
        return ()
    array = shard.pairs * sum(reductions)
    return (
        Collective(
            kind="all-reduce",
            axes=axes,
            count=len(reductions) * len(shard.heads),
            bytes=2 * array * (degree - 1) // degree,
            rounds=len(reductions),
            round_bytes=array // len(reductions),
            hidden=1.0,
        ),
    )


@final
@dataclass(frozen=True)
class RingReducer(Reducer):
    """Reduces key statistics over the devices of a ring."""

    axes: tuple[str, ...]

    def psum(self, *values: Array) -> tuple[Array, ...]:
        """Returns the sum of each value over the ring, in one all-reduce."""
        sums: tuple[Array, ...] = jax.lax.psum(values, self.axes)
        return sums

    def pmax(self, *values: Array) -> tuple[Array, ...]:
        """Returns the maximum of each value over the ring, in one all-reduce."""
        largest: tuple[Array, ...] = jax.lax.pmax(values, self.axes)
        return largest


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """One hop of rings of `degree` devices: every device sends along `steps` over `axes`."""

    axes: tuple[str, ...]
    steps: Steps
    degree: int

    def send(self, x: Shaped[Array, "B T N H"]) -> Shaped[Array, "B T N H"]:
        """Returns the `x` that arrives."""
        return ppermute_columns(x, self.axes, self.steps)


@final
@dataclass(frozen=True, kw_only=True)
class Ring(SplitKV, KernelScheme):
    """Sends k and v over `degree` - 1 hops; each is issued before the kernel that can hide it.

    Along `across` there are `num_rings` rings next to each other, such as those of the two devices
    of each tpu7x chip, which share the links between chips. Every other one turns the other way
    round: a link then carries one shard each way in a hop, in place of two the same way.
    """

    across: tuple[str, ...] = ()
    num_rings: int = 1

    def for_mesh(self, problem: AttentionProblem, options: AttentionOptions) -> ContextParallel:
        """Returns this scheme with its degrees; to two devices both ways round are the same."""
        scheme = super().for_mesh(problem, options)
        if not isinstance(scheme, Ring):
            return scheme
        rings = axes_size(problem.mesh, self.across) if scheme.degree > 2 else 1
        return replace(scheme, across=self.across if rings > 1 else (), num_rings=rings)

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
        """Returns the result of each group; every group has a call in every hop.

        The first group has the first call and the last one, so others may arrive late and leave
        early.
        """
        kv_mask, output_only = lengths.with_mask(mask), result is Result.OUTPUT
        finalize = backend.finalize if output_only else backend.finalize_with_log_sum
        here = kv_mask.shard(self.source(0), self.degree)
        with jax.named_scope("kernel"):
            k, kv_stats = backend.preprocess_kv(k, v, here, RingReducer(self.axes))
            stats = [backend.preprocess_q(q, kv_stats) for q in queries]
        groups = range(len(queries))
        results: list[Any] = [None] * len(queries)
        for hop, (k_hop, v_hop, arrived) in enumerate(self.shards(k, v, kv_mask)):
            last = hop == self.degree - 1
            call: Callable[..., Any] = finalize if last else backend.accumulate
            for group in reversed(groups) if last else groups:
                with jax.named_scope("kernel"):
                    results[group] = call(
                        queries[group], k_hop, v_hop, arrived, stats[group], results[group]
                    )
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
        """Returns the gradients of this device's queries and keys; the queries rotate."""
        here = kv_mask.shard(self.source(0), self.degree)
        return rotating_gradients(groups, k, v, here, backend, self.rotation)

    def shards(
        self, k: PreparedKeys, v: Keys, kv_mask: KVMask
    ) -> Iterator[tuple[PreparedKeys, Keys, LocalKVMask]]:
        """Yields k, v and their mask for every hop; the next hop is issued before the yield."""
        rotation = self.rotation
        for hop in range(self.degree):
            last = hop == self.degree - 1
            following = (k, v) if last else (rotation.send(k), rotation.send(v))
            yield k, v, kv_mask.shard(self.source(hop), self.degree)
            k, v = following

    def source(self, hop: int) -> Int[Array, ""]:
        """Returns the device whose keys are here after `hop` hops."""
        here = jax.lax.axis_index(self.axes)
        if self.num_rings == 1:
            return (here - hop) % self.degree
        backwards = jax.lax.axis_index(self.across) % 2 == 1
        return jnp.where(backwards, here + hop, here - hop) % self.degree

    @property
    def rotation(self) -> Rotation:
        """The hop of every device, along all rings."""
        rings = self.num_rings
        steps = [
            (device * rings + ring, (device + (-1) ** ring) % self.degree * rings + ring)
            for device in range(self.degree)
            for ring in range(rings)
        ]
        return Rotation(axes=(*self.axes, *self.across), steps=steps, degree=self.degree)

    def local_problem(self, shard: LocalProblem) -> LocalProblem:
        """Returns the shard itself: local queries against the keys of one device."""
        return shard

    def collectives(
        self, shard: LocalProblem, reductions: Sequence[int] = ()
    ) -> tuple[Collective, ...]:
        """Returns the hops of k and v, and the reductions of key statistics."""
        hops = self.degree - 1
        rotation = Collective(
            kind="collective-permute",
            axes=self.axes,
            count=2 * hops * len(shard.heads),
            bytes=2 * hops * shard.kv_bytes,
            rounds=hops,
            round_bytes=2 * shard.kv_bytes,
            overlap=1.0,
            counter=self.across,
        )
        return (rotation, *reduction_collectives(self.axes, self.degree, shard, reductions))

    def backward_collectives(self, shard: LocalProblem) -> tuple[Collective, ...]:
        """Returns the hops of queries and of their gradients."""
        return rotation_collectives(self.axes, self.degree, shard, counter=self.across)

    def title(self) -> str:
        """Returns what is sent, in a few words."""
        ways = ", both ways round" if self.across else ""
        hops = f"{self.degree - 1} hops{ways}"
        return f"k, v rotate over {'x'.join(self.axes)}={self.degree}, {hops}"


def rotating_gradients(
    groups: Sequence[OutputGradient],
    k: PreparedKeys,
    v: Keys,
    mask: LocalKVMask,
    backend: AnyBackend,
    rotation: Rotation,
) -> Gradients:
    """Returns the gradients where queries make a round trip of `rotation`, and keys stay.

    The next queries are sent before the kernels run. The gradient of the own queries stays here;
    those of others travel with them, and the last hop takes them home.
    """
    own: list[Queries] = []
    d_k: Any = 0.0
    d_v: Any = 0.0
    home: list[Any] = [0.0] * len(groups)
    order = range(len(groups))
    for hop in range(rotation.degree):
        last = hop == rotation.degree - 1
        following = [] if last else [send_queries(group, rotation) for group in groups]
        for index in reversed(order) if last else order:
            (d_q,), more_k, more_v = local_gradients([groups[index]], k, v, mask, backend)
            d_k, d_v = d_k + more_k, d_v + more_v
            if hop == 0:
                own.append(d_q)
            else:
                home[index] = rotation.send(home[index] + d_q)
        groups = following
    return [here + arrived for here, arrived in zip(own, home, strict=True)], d_k, d_v


def send_queries(group: OutputGradient, rotation: Rotation) -> OutputGradient:
    """Returns the queries that arrive when every device sends its own.

    Both sums go as one array with tokens last: a tile of a few heads would be padded.
    """
    q, d_out = rotation.send(group.q), rotation.send(group.d_out)
    with jax.named_scope(COLLECTIVE_SCOPE):
        sums = jnp.stack([group.log_sum, group.delta]).transpose(0, 1, 3, 2)
        arrived = jax.lax.ppermute(sums, rotation.axes, rotation.steps).transpose(0, 1, 3, 2)
    return OutputGradient(q, d_out, arrived[0], arrived[1])


def rotation_collectives(
    axes: tuple[str, ...],
    degree: int,
    shard: LocalProblem,
    *,
    wraps: bool = True,
    counter: tuple[str, ...] = (),
) -> tuple[Collective, ...]:
    """Returns the hops of queries and of their gradients in a backward pass.

    The first are q, d_out and both sums. The gradients of q have no kernel left to run under on
    their last hop.
    """
    hops, groups = degree - 1, len(shard.heads)
    sums = 2 * shard.pairs * shard.q_len * FLOAT32_BYTES
    gradient = shard.pairs * shard.q_len * shard.head_dim * FLOAT32_BYTES
    queries = 2 * shard.q_bytes + sums
    return (
        Collective(
            kind="collective-permute",
            axes=axes,
            count=3 * hops * groups,
            bytes=hops * queries,
            rounds=hops,
            round_bytes=queries,
            overlap=1.0,
            wraps=wraps,
            counter=counter,
        ),
        Collective(
            kind="collective-permute",
            axes=axes,
            count=hops * groups,
            bytes=hops * gradient,
            rounds=hops,
            round_bytes=gradient,
            overlap=(hops - 1) / hops,
            wraps=wraps,
            counter=counter,
        ),
    )

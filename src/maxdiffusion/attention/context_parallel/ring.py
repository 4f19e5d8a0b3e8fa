"""Ring attention: k and v rotate over the devices, and partial attentions are merged.

Its gradient rotates the keys once more, together with their own gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from maxdiffusion.attention.backends import AnyBackend, Reducer
from maxdiffusion.attention.backends.base import Keys, LogSum, PreparedKeys, Queries
from maxdiffusion.attention.context_parallel.base import Collective, SplitKV
from maxdiffusion.attention.problem import (
    KVMask,
    LocalKVMask,
    LocalProblem,
)
from maxdiffusion.runtime.timing import COLLECTIVE_SCOPE

Mask = Bool[Array, "B _"]
Residuals = tuple[list[Queries], Keys, Keys, Mask | None, list[tuple[Queries, LogSum]]]


@jax.named_scope(COLLECTIVE_SCOPE)
def ppermute_columns(
    x: Shaped[Array, "B T N H"], axes: tuple[str, ...], steps: list[tuple[int, int]]
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


@final
@dataclass(frozen=True, kw_only=True)
class Ring(SplitKV):
    """Sends k and v over `degree` - 1 hops; each is issued before the kernel that can hide it."""

    def attend(
        self, q: Queries, k: Keys, v: Keys, *, kv_mask: KVMask, backend: AnyBackend
    ) -> Queries:
        """Returns the attention of this device's queries over all keys."""
        return self.attend_groups([q], k, v, kv_mask=kv_mask, backend=backend)[0]

    def attend_groups(
        self, queries: Sequence[Queries], k: Keys, v: Keys, *, kv_mask: KVMask, backend: AnyBackend
    ) -> list[Queries]:
        """Returns the attention of each group of queries; every group has a call in every hop.

        The first group has the first call and the last one, so others may arrive late and leave
        early.
        """
        here = kv_mask.shard(self.source(0), self.degree)
        with jax.named_scope("kernel"):
            k, kv_stats = backend.preprocess_kv(k, v, here, RingReducer(self.axes))
            stats = [backend.preprocess_q(q, kv_stats) for q in queries]
        if backend.has_shard_gradients:
            attend = differentiable_ring(self, backend, kv_mask)
            return attend([*queries], k, v, kv_mask.mask, stats)
        return self.run(queries, (k, v), kv_mask, stats, backend, backend.finalize)

    def run(
        self,
        queries: Sequence[Queries],
        kv: tuple[PreparedKeys, Keys],
        kv_mask: KVMask,
        stats: Sequence[Any],
        backend: AnyBackend,
        finalize: Callable[..., Any],
    ) -> list[Any]:
        """Returns what `finalize` returns for each group at the last hop."""
        groups = range(len(queries))
        results: list[Any] = [None] * len(queries)
        for hop, (k_hop, v_hop, mask) in enumerate(self.shards(*kv, kv_mask)):
            last = hop == self.degree - 1
            call = finalize if last else backend.accumulate
            for group in reversed(groups) if last else groups:
                with jax.named_scope("kernel"):
                    results[group] = call(
                        queries[group], k_hop, v_hop, mask, stats[group], results[group]
                    )
        return results

    def shards(
        self, k: PreparedKeys, v: Keys, kv_mask: KVMask
    ) -> Iterator[tuple[PreparedKeys, Keys, LocalKVMask]]:
        """Yields k, v and their mask for every hop; the next hop is issued before the yield."""
        for hop in range(self.degree):
            following = self.rotate(k, v) if hop < self.degree - 1 else (k, v)
            yield k, v, kv_mask.shard(self.source(hop), self.degree)
            k, v = following

    def source(self, hop: int) -> Int[Array, ""]:
        """Returns the device whose keys are here after `hop` hops."""
        return (jax.lax.axis_index(self.axes) - hop) % self.degree

    def rotate(self, *arrays: Array) -> tuple[Array, ...]:
        """Returns each array of the previous device of the ring."""
        steps = [(device, (device + 1) % self.degree) for device in range(self.degree)]
        return tuple(ppermute_columns(array, self.axes, steps) for array in arrays)

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
        )
        return (rotation, *reduction_collectives(self.axes, self.degree, shard, reductions))

    def title(self) -> str:
        """Returns what is sent, in a few words."""
        return f"k, v rotate over {'x'.join(self.axes)}={self.degree}, {self.degree - 1} hops"


def differentiable_ring(
    ring: Ring, backend: AnyBackend, kv_mask: KVMask
) -> Callable[[list[Queries], Keys, Keys, Mask | None, list[Any]], list[Queries]]:
    """Returns the ring's attention with its own gradient; it saves outputs and their log-sums.

    It takes keys and statistics as the backend's `preprocess_kv` and `preprocess_q` return them.
    """

    def primal(
        queries: list[Queries], k: Keys, v: Keys, mask: Mask | None, stats: list[Any]
    ) -> list[Queries]:
        masked = kv_mask.with_mask(mask)
        return ring.run(queries, (k, v), masked, stats, backend, backend.finalize)

    def forward(
        queries: list[Queries], k: Keys, v: Keys, mask: Mask | None, stats: list[Any]
    ) -> tuple[list[Queries], Residuals]:
        masked, finalize = kv_mask.with_mask(mask), backend.finalize_with_log_sum
        results = ring.run(queries, (k, v), masked, stats, backend, finalize)
        return [out for out, _ in results], (queries, k, v, mask, results)

    def backward(saved: Residuals, d_outs: list[Queries]) -> tuple[Any, ...]:
        queries, k, v, mask, results = saved
        d_queries = [jnp.zeros(q.shape, jnp.float32) for q in queries]
        d_k, d_v = (jnp.zeros(part.shape, jnp.float32) for part in (k, v))
        for k_hop, v_hop, arrived in ring.shards(k, v, kv_mask.with_mask(mask)):
            for group, (q, (out, log_sum)) in enumerate(zip(queries, results, strict=True)):
                with jax.named_scope("kernel"):
                    more = backend.gradients(q, k_hop, v_hop, arrived, out, log_sum, d_outs[group])
                totals = zip((d_queries[group], d_k, d_v), more, strict=True)
                d_queries[group], d_k, d_v = (
                    total + part.astype(jnp.float32) for total, part in totals
                )
            # The gradients make one more hop than the keys: `degree` hops bring them home.
            d_k, d_v = ring.rotate(d_k, d_v)
        d_queries = [d_q.astype(v.dtype) for d_q in d_queries]
        return d_queries, d_k.astype(v.dtype), d_v.astype(v.dtype), None, None

    attend = jax.custom_vjp(primal)
    attend.defvjp(forward, backward)
    return attend

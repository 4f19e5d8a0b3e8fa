"""Two streams of keys in opposite directions, for axes whose ends are not neighbours.

After hop t device i holds the keys of device i - t (stream up) and i + t (stream down), where those
exist. Nothing crosses from the last device to the first, a device sends only keys that a later
device still needs, and the kernel runs only on keys that arrived. So each of R devices runs
exactly R kernels, and its keys come from at most R - 1 links away: a device at an end gets one
shard a hop for R - 1 hops; the one in the middle gets two a hop for about R/2 hops and no more
after that. Critical path: R - 1 hops between neighbours, each overlapped with up to two kernel
calls, against R - 1 hops of a ring whose closing link, without a wrap-around, is R - 1 links long.

Gradients have to come home, which two streams would take 2 R - 2 hops for. In the backward pass
queries rotate over the ring 0, 2, 4, ..., 5, 3, 1, whose neighbours are at most two links apart:
up over the even devices and down over the odd ones. So each link carries one shard each way in
each of R - 1 hops.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import jax
from jaxtyping import Array, Bool, Int

from maxdiffusion.attention.backends import AnyBackend
from maxdiffusion.attention.backends.base import Keys, PreparedKeys, Queries, output
from maxdiffusion.attention.context_parallel.base import (
    Collective,
    Gradients,
    KernelScheme,
    Mask,
    OutputGradient,
    Ran,
    Result,
    SplitKV,
)
from maxdiffusion.attention.context_parallel.ring import (
    RingReducer,
    Rotation,
    Steps,
    ppermute_columns,
    reduction_collectives,
    rotating_gradients,
    rotation_collectives,
)
from maxdiffusion.attention.problem import KVMask, LocalProblem
from maxdiffusion.kernels.reference import Partials

Stream = tuple[Array, Array]


@final
@dataclass(frozen=True, kw_only=True)
class BidirectionalRing(SplitKV, KernelScheme):
    """Sends k and v up and down a line of `degree` devices, without a closing link."""

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
        """Returns the result of each group of queries."""
        kv_mask = lengths.with_mask(mask)
        here = jax.lax.axis_index(self.axes)
        local = kv_mask.shard(here, self.degree)
        with jax.named_scope("kernel"):
            k, kv_stats = backend.preprocess_kv(k, v, local, RingReducer(self.axes))
            stats = [backend.preprocess_q(q, kv_stats) for q in queries]

        def accumulate(
            carry: list[Partials], stream: Stream, source: Int[Array, ""]
        ) -> list[Partials]:
            arrived = kv_mask.shard(source, self.degree)
            with jax.named_scope("kernel"):
                return [
                    backend.accumulate(q, *stream, arrived, known, total)
                    for q, known, total in zip(queries, stats, carry, strict=True)
                ]

        def if_arrived(
            arrived: Bool[Array, ""], carry: list[Partials], stream: Stream, source: Int[Array, ""]
        ) -> list[Partials]:
            merged: list[Partials] = jax.lax.cond(
                arrived, accumulate, lambda carry, *_: carry, carry, stream, source
            )
            return merged

        up, down = self.send_up((k, v), 1), self.send_down((k, v), 1)
        with jax.named_scope("kernel"):
            carry = [
                backend.accumulate(q, k, v, local, known, None)
                for q, known in zip(queries, stats, strict=True)
            ]
        for hop in range(1, self.degree):
            last = hop == self.degree - 1
            next_up = up if last else self.send_up(up, hop + 1)
            next_down = down if last else self.send_down(down, hop + 1)
            carry = if_arrived(here >= hop, carry, up, here - hop)
            carry = if_arrived(here + hop < self.degree, carry, down, here + hop)
            up, down = next_up, next_down
        outs = [output(total, q.dtype) for q, total in zip(queries, carry, strict=True)]
        if result is Result.OUTPUT:
            return Ran(tuple(outs), k)
        return Ran(tuple(zip(outs, map(backend.log_sum, carry), strict=True)), k)

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
        here = kv_mask.shard(jax.lax.axis_index(self.axes), self.degree)
        rotation = Rotation(axes=self.axes, steps=self.folded_ring, degree=self.degree)
        return rotating_gradients(groups, k, v, here, backend, rotation)

    @property
    def folded_ring(self) -> Steps:
        """Source and target of each hop over a ring of even devices upwards, odd ones downwards."""
        order = [*range(0, self.degree, 2), *reversed(range(1, self.degree, 2))]
        return [*zip(order, [*order[1:], order[0]], strict=True)]

    def send_up(self, stream: Stream, hop: int) -> Stream:
        """Returns the stream towards higher indices after hop `hop`; each time one device less."""
        steps = [(device, device + 1) for device in range(hop - 1, self.degree - 1)]
        return self._send(stream, steps)

    def send_down(self, stream: Stream, hop: int) -> Stream:
        """Returns the stream towards lower indices after hop `hop`."""
        steps = [(device, device - 1) for device in range(1, self.degree - hop + 1)]
        return self._send(stream, steps)

    def _send(self, stream: Stream, steps: Steps) -> Stream:
        k, v = (ppermute_columns(part, self.axes, steps) for part in stream)
        return k, v

    def local_problem(self, shard: LocalProblem) -> LocalProblem:
        """Returns the shard itself: local queries against the keys of one device."""
        return shard

    def collectives(
        self, shard: LocalProblem, reductions: Sequence[int] = ()
    ) -> tuple[Collective, ...]:
        """Returns the hops of both streams, and the reductions of key statistics."""
        hops = self.degree - 1
        # Device i sends i + 1 shards up and R - i down, unless it is at an end.
        busiest = 1 if self.degree == 2 else self.degree + 1
        streams = Collective(
            kind="collective-permute",
            axes=self.axes,
            count=4 * hops * len(shard.heads),
            bytes=2 * busiest * shard.kv_bytes,
            rounds=hops,
            round_bytes=2 * shard.kv_bytes,
            overlap=1.0,
            wraps=False,
        )
        return (streams, *reduction_collectives(self.axes, self.degree, shard, reductions))

    def backward_collectives(self, shard: LocalProblem) -> tuple[Collective, ...]:
        """Returns the hops of queries and of their gradients over the folded ring."""
        return rotation_collectives(self.axes, self.degree, shard, wraps=False)

    def title(self) -> str:
        """Returns what is sent, in a few words."""
        return (
            f"k, v go both ways over {'x'.join(self.axes)}={self.degree}, "
            f"{self.degree - 1} hops, no wrap-around"
        )

"""Two streams of keys in opposite directions, for axes whose ends are not neighbours.

After hop t device i holds the keys of device i - t (stream up) and i + t (stream down), where those
exist. Nothing crosses from the last device to the first, a device sends only keys that a later
device still needs, and the kernel runs only on keys that arrived. So each of R devices runs
exactly R kernels, and its keys come from at most R - 1 links away: a device at an end gets one
shard a hop for R - 1 hops; the one in the middle gets two a hop for about R/2 hops and no more
after that. Critical path: R - 1 hops between neighbours, each overlapped with up to two kernel
calls, against R - 1 hops of a ring whose closing link, without a wrap-around, is R - 1 links long.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import jax
from jaxtyping import Array, Bool, Int

from maxdiffusion.attention.backends import AnyBackend
from maxdiffusion.attention.backends.base import Keys, Queries, output
from maxdiffusion.attention.context_parallel.base import Collective, SplitKV
from maxdiffusion.attention.context_parallel.ring import (
    RingReducer,
    ppermute_columns,
    reduction_collectives,
)
from maxdiffusion.attention.problem import KVMask, LocalProblem
from maxdiffusion.kernels.reference import Partials

Stream = tuple[Array, Array]


@final
@dataclass(frozen=True, kw_only=True)
class BidirectionalRing(SplitKV):
    """Sends k and v up and down a line of `degree` devices, without a closing link."""

    def attend(
        self, q: Queries, k: Keys, v: Keys, *, kv_mask: KVMask, backend: AnyBackend
    ) -> Queries:
        """Returns the attention of this device's queries over all keys."""
        here = jax.lax.axis_index(self.axes)
        local = kv_mask.shard(here, self.degree)
        with jax.named_scope("kernel"):
            k, stats = backend.preprocess_kv(k, v, local, RingReducer(self.axes))
            stats = backend.preprocess_q(q, stats)

        def accumulate(carry: Partials, stream: Stream, source: Int[Array, ""]) -> Partials:
            arrived = kv_mask.shard(source, self.degree)
            with jax.named_scope("kernel"):
                return backend.accumulate(q, *stream, arrived, stats, carry)

        def if_arrived(
            arrived: Bool[Array, ""], carry: Partials, stream: Stream, source: Int[Array, ""]
        ) -> Partials:
            merged: Partials = jax.lax.cond(
                arrived, accumulate, lambda carry, *_: carry, carry, stream, source
            )
            return merged

        up, down = self.send_up((k, v), 1), self.send_down((k, v), 1)
        with jax.named_scope("kernel"):
            carry = backend.accumulate(q, k, v, local, stats, None)
        for hop in range(1, self.degree):
            last = hop == self.degree - 1
            next_up = up if last else self.send_up(up, hop + 1)
            next_down = down if last else self.send_down(down, hop + 1)
            carry = if_arrived(here >= hop, carry, up, here - hop)
            carry = if_arrived(here + hop < self.degree, carry, down, here + hop)
            up, down = next_up, next_down
        return output(carry, q.dtype)

    def send_up(self, stream: Stream, hop: int) -> Stream:
        """Returns the stream towards higher indices after hop `hop`; each time one device less."""
        steps = [(device, device + 1) for device in range(hop - 1, self.degree - 1)]
        return self._send(stream, steps)

    def send_down(self, stream: Stream, hop: int) -> Stream:
        """Returns the stream towards lower indices after hop `hop`."""
        steps = [(device, device - 1) for device in range(1, self.degree - hop + 1)]
        return self._send(stream, steps)

    def _send(self, stream: Stream, steps: list[tuple[int, int]]) -> Stream:
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

    def title(self) -> str:
        """Returns what is sent, in a few words."""
        return (
            f"k, v go both ways over {'x'.join(self.axes)}={self.degree}, "
            f"{self.degree - 1} hops, no wrap-around"
        )

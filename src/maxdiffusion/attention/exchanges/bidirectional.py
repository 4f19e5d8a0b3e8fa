"""Two streams of keys in opposite directions, for axes whose ends are not neighbours.

After hop t device i holds the keys of device i - t (stream up) and i + t (stream down), where those
exist. Nothing crosses from the last device to the first, a device sends only keys that somebody
further on still needs, and the kernel runs only on keys that arrived. So each of R devices runs
exactly R kernels, and its keys come from at most R - 1 links away: a device at an end gets one
shard a hop for R - 1 hops; the one in the middle gets two a hop for about R/2 hops and then waits
for nothing. Critical path: R - 1 hops between neighbours, each overlapped with up to two kernel
calls, against R - 1 hops of a ring whose closing link, without a wrap-around, is R - 1 links long.
"""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Bool, Float, Int

from maxdiffusion.attention.exchanges.base import HeadsAtHome, tokens_bytes
from maxdiffusion.attention.exchanges.ring import Ring, RingShards, sent
from maxdiffusion.attention.geometry import Geometry
from maxdiffusion.attention.keys import GlobalKeys
from maxdiffusion.attention.merge import output
from maxdiffusion.attention.on_device import DeviceKernel, KernelSizes
from maxdiffusion.kernels.reference import Partials

Stream = tuple[Array, Array]


@dataclass(frozen=True, kw_only=True)
class BidirectionalRing(HeadsAtHome):
    """k and v go up and down a line of `degree` devices, without the link that would close it."""

    axes: tuple[str, ...]
    degree: int

    def __call__(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        keys: GlobalKeys,
        kernel: DeviceKernel,
    ) -> Float[Array, "B S N H"]:
        """The attention of this device's queries over all keys."""
        here = jax.lax.axis_index(self.axes)
        local = keys.shard(here, self.degree)
        with jax.named_scope("kernel"):
            k, known = kernel.prepare_keys(k, v, local, RingShards(self.axes))
            shared = kernel.prepare_queries(q, known)

        def attended(total: Partials, stream: Stream, source: Int[Array, ""]) -> Partials:
            arrived = keys.shard(source, self.degree)
            with jax.named_scope("kernel"):
                return kernel.carry_on(q, *stream, arrived, shared, total)

        def if_there(
            there: Bool[Array, ""], total: Partials, stream: Stream, source: Int[Array, ""]
        ) -> Partials:
            return jax.lax.cond(there, attended, lambda total, *_: total, total, stream, source)

        up, down = self.sent_up((k, v), 1), self.sent_down((k, v), 1)
        with jax.named_scope("kernel"):
            total = kernel.carry_on(q, k, v, local, shared, None)
        for hop in range(1, self.degree):
            last = hop == self.degree - 1
            next_up = up if last else self.sent_up(up, hop + 1)
            next_down = down if last else self.sent_down(down, hop + 1)
            total = if_there(here >= hop, total, up, here - hop)
            total = if_there(here + hop < self.degree, total, down, here + hop)
            up, down = next_up, next_down
        return output(total, q.dtype)

    def sent_up(self, stream: Stream, hop: int) -> Stream:
        """The stream towards higher indices after its `hop`-th hop, shorter each time."""
        steps = [(device, device + 1) for device in range(hop - 1, self.degree - 1)]
        return self._moved(stream, steps)

    def sent_down(self, stream: Stream, hop: int) -> Stream:
        """The stream towards lower indices after its `hop`-th hop."""
        steps = [(device, device - 1) for device in range(1, self.degree - hop + 1)]
        return self._moved(stream, steps)

    def _moved(self, stream: Stream, steps: list[tuple[int, int]]) -> Stream:
        k, v = (sent(part, self.axes, steps) for part in stream)
        return k, v

    def kernel_sizes(self, geometry: Geometry) -> KernelSizes:
        """Local queries against the keys of one device."""
        return Ring(axes=self.axes, degree=self.degree).kernel_sizes(geometry)

    def bytes_sent(self, geometry: Geometry) -> int:
        """What the busiest device sends: i + 1 shards up and R - i down, unless it is at an end."""
        shards = 1 if self.degree == 2 else self.degree + 1
        local = tokens_bytes(geometry, geometry.padded_kv_len // geometry.shape.context)
        return 2 * shards * local

    def title(self) -> str:
        """What moves, in a few words."""
        return (
            f"k, v go both ways over {'x'.join(self.axes)}={self.degree}, "
            f"{self.degree - 1} hops, no wrap-around"
        )

    def waste(self, geometry: Geometry) -> str:
        """Nothing."""
        return ""

"""Ring: keys and values travel round the devices, and partial attentions are merged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from maxdiffusion.attention.exchanges.base import HeadsAtHome, tokens_bytes
from maxdiffusion.attention.exchanges.ring_gradient import differentiable_ring
from maxdiffusion.attention.geometry import Geometry
from maxdiffusion.attention.keys import GlobalKeys, KeyShard
from maxdiffusion.attention.on_device import DeviceKernel, GradientKernel, KernelSizes
from maxdiffusion.kernels.reference import Partials


@jax.named_scope("exchange")
def sent(
    x: Float[Array, "B T N H"], axes: tuple[str, ...], steps: list[tuple[int, int]]
) -> Float[Array, "B T N H"]:
    """What arrives here when every device sends `x` along `steps`; heads travel as columns.

    A [N, H] tile of a few heads would be padded, and transposed on the way in and out of the hop.
    """
    columns = x.reshape(*x.shape[:2], -1)
    return jax.lax.ppermute(columns, axes, steps).reshape(x.shape)


@dataclass(frozen=True)
class RingShards:
    """The devices of a ring, for the small reductions that make a key mean or a bound global."""

    axes: tuple[str, ...]

    def total(self, *values: Array) -> tuple[Array, ...]:
        """The sum of each over the ring, in one reduction."""
        return jax.lax.psum(values, self.axes)

    def largest(self, *values: Array) -> tuple[Array, ...]:
        """The maximum of each over the ring, in one reduction."""
        return jax.lax.pmax(values, self.axes)


@dataclass(frozen=True, kw_only=True)
class Ring(HeadsAtHome):
    """k and v make `degree` - 1 hops; each is issued before the kernel that can hide it."""

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
        return self.in_turns([q], k, v, keys, kernel)[0]

    def in_turns(
        self,
        queries: Sequence[Float[Array, "B S N H"]],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        keys: GlobalKeys,
        kernel: DeviceKernel,
    ) -> list[Float[Array, "B S N H"]]:
        """The attention of each group of queries, by calls of their own under every hop.

        The first group has the first call and the last one, so others may come late and leave
        early.
        """
        if isinstance(kernel, GradientKernel):
            attend = differentiable_ring(self, kernel, keys)
            return [attend(q, k, v, keys.mask) for q in queries]
        return self._taken_in(queries, k, v, keys, kernel, kernel.finish)

    def partials(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        keys: GlobalKeys,
        kernel: DeviceKernel,
    ) -> Partials:
        """The partial over the keys of the whole ring."""
        return self._taken_in([q], k, v, keys, kernel, kernel.carry_on)[0]

    def _taken_in(
        self,
        queries: Sequence[Float[Array, "B S N H"]],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        keys: GlobalKeys,
        kernel: DeviceKernel,
        last: Callable[..., Any],
    ) -> list[Any]:
        """What `last` makes of the last shard of keys and of the partial over those before it."""
        here = keys.shard(self.source(0), self.degree)
        with jax.named_scope("kernel"):
            k, known = kernel.prepare_keys(k, v, here, RingShards(self.axes))
            shared = [kernel.prepare_queries(q, known) for q in queries]
        before: list[Any] = [None] * len(queries)

        def attended(call: Callable[..., Any], group: int, keys: KeyShard) -> Any:
            with jax.named_scope("kernel"):
                return call(queries[group], k, v, keys, shared[group], before[group])

        groups = range(len(queries))
        for hop in range(self.degree - 1):
            # Sent before they are used, so that the hop can run under the kernel.
            following = self.passed_on(k, v)
            arrived = keys.shard(self.source(hop), self.degree)
            before = [attended(kernel.carry_on, group, arrived) for group in groups]
            k, v = following
        arrived = keys.shard(self.source(self.degree - 1), self.degree)
        return [attended(last, group, arrived) for group in reversed(groups)][::-1]

    def source(self, hop: int) -> Int[Array, ""]:
        """The device whose keys are here after `hop` hops."""
        return (jax.lax.axis_index(self.axes) - hop) % self.degree

    def passed_on(self, *arrays: Array) -> tuple[Array, ...]:
        """What the previous device of the ring held of each array."""
        steps = [(device, (device + 1) % self.degree) for device in range(self.degree)]
        return tuple(sent(array, self.axes, steps) for array in arrays)

    def kernel_sizes(self, geometry: Geometry) -> KernelSizes:
        """Local queries against the keys of one ring device."""
        return KernelSizes(
            batch=geometry.local_batch,
            heads=(geometry.local_heads,),
            q_len=geometry.padded_q_len // geometry.shape.context,
            kv_len=geometry.padded_kv_len // self.degree,
        )

    def bytes_sent(self, geometry: Geometry) -> int:
        """k and v of one device, once per hop."""
        local = tokens_bytes(geometry, geometry.padded_kv_len // geometry.shape.context)
        return 2 * (self.degree - 1) * local

    def title(self) -> str:
        """What moves, in a few words."""
        return f"k, v rotate over {'x'.join(self.axes)}={self.degree}, {self.degree - 1} hops"

    def waste(self, geometry: Geometry) -> str:
        """Nothing."""
        return ""

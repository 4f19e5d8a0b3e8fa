"""What an exchange between context devices is, and the two that move no queries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
from jaxtyping import Array, Float

from maxdiffusion.attention.geometry import Geometry
from maxdiffusion.attention.keys import GlobalKeys
from maxdiffusion.attention.on_device import Alone, DeviceKernel, KernelSizes
from maxdiffusion.kernels.heads import HeadPlaces, Places

Placed = Sequence[Float[Array, "K S D"]]


class Exchange(Protocol):
    """Moves keys, queries or heads between devices around calls of a kernel (inside shard_map)."""

    def __call__(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        keys: GlobalKeys,
        kernel: DeviceKernel,
    ) -> Float[Array, "B S N H"]:
        """The attention of this device's queries over all keys."""

    def places(self, batch: int, heads: int) -> HeadPlaces:
        """Where the heads of a device's batch have to lie for `of_placed` (inside shard_map)."""

    def of_placed(
        self, q: Placed, k: Placed, v: Placed, keys: GlobalKeys, kernel: DeviceKernel
    ) -> Placed:
        """The same attention on heads that lie in their places already, and its output in them."""

    def kernel_sizes(self, geometry: Geometry) -> KernelSizes:
        """The sizes of one kernel call."""

    def bytes_sent(self, geometry: Geometry) -> int:
        """Bytes of q, k, v and output that one device sends for one attention."""

    def title(self) -> str:
        """What moves, in a few words."""

    def waste(self, geometry: Geometry) -> str:
        """What else than tokens is padded, or nothing."""


class HeadsAtHome(Exchange):
    """An exchange that moves no heads: their places are where they are."""

    def in_turns(
        self,
        queries: Sequence[Float[Array, "B S N H"]],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        keys: GlobalKeys,
        kernel: DeviceKernel,
    ) -> list[Float[Array, "B S N H"]]:
        """The attention of each of several groups of queries."""
        return [self(q, k, v, keys, kernel) for q in queries]

    def places(self, batch: int, heads: int) -> HeadPlaces:
        """Every head where it is."""
        return HeadPlaces.alike(Places.at_home(batch, heads))

    def of_placed(
        self, q: Placed, k: Placed, v: Placed, keys: GlobalKeys, kernel: DeviceKernel
    ) -> Placed:
        """The attention of heads as columns."""
        heads = [x.reshape(*x.shape[:2], -1, kernel.site.head_dim) for (x,) in (q, k, v)]
        out = self(heads[0], heads[1], heads[2], keys, kernel)
        return [out.reshape(*out.shape[:2], -1)]


def tokens_bytes(geometry: Geometry, tokens: int) -> int:
    """Bytes of `tokens` tokens of one of q, k, v on one device's batch and heads."""
    width = geometry.problem.head_dim * geometry.problem.dtype.itemsize
    return geometry.local_batch * tokens * geometry.local_heads * width


@dataclass(frozen=True)
class Stay(HeadsAtHome):
    """Nothing moves: this device has all the keys its queries need."""

    def __call__(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        keys: GlobalKeys,
        kernel: DeviceKernel,
    ) -> Float[Array, "B S N H"]:
        """The kernel's attention over the keys that are here."""
        whole = keys.whole()
        with jax.named_scope("kernel"):
            k, known = kernel.prepare_keys(k, v, whole, Alone())
            return kernel.attend(q, k, v, whole, kernel.prepare_queries(q, known))

    def kernel_sizes(self, geometry: Geometry) -> KernelSizes:
        """Local queries, all keys."""
        return KernelSizes(
            batch=geometry.local_batch,
            heads=(geometry.local_heads,),
            q_len=geometry.padded_q_len // geometry.shape.context,
            kv_len=geometry.padded_kv_len,
        )

    def bytes_sent(self, geometry: Geometry) -> int:
        """Nothing."""
        return 0

    def title(self) -> str:
        """What moves, in a few words."""
        return "none (keys are local)"

    def waste(self, geometry: Geometry) -> str:
        """Nothing."""
        return ""


@dataclass(frozen=True, kw_only=True)
class Gather(HeadsAtHome):
    """Every device collects all keys and values of the sequence, then attends alone."""

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
        """The attention of this device's queries over the collected keys."""
        with jax.named_scope("exchange"):
            k, v = (jax.lax.all_gather(part, self.axes, axis=1, tiled=True) for part in (k, v))
        return Stay()(q, k, v, keys, kernel)

    def kernel_sizes(self, geometry: Geometry) -> KernelSizes:
        """Local queries, all keys."""
        return Stay().kernel_sizes(geometry)

    def bytes_sent(self, geometry: Geometry) -> int:
        """This device's k and v, to each of the others."""
        local = tokens_bytes(geometry, geometry.padded_kv_len // self.degree)
        return 2 * (self.degree - 1) * local

    def title(self) -> str:
        """What moves, in a few words."""
        return f"k, v gathered over {'x'.join(self.axes)}={self.degree}"

    def waste(self, geometry: Geometry) -> str:
        """Nothing."""
        return ""

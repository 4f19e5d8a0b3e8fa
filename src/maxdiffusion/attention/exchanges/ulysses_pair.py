"""Ulysses between two devices around a ring, with nothing that is waited for.

Each of the two takes half of the heads. Keys and values are traded as ever, beside the products
that come after them. Queries of this device's own tokens are here already: their first kernel call
runs while those of the other device, its guests, arrive, and their last call while the guests'
output travels home.

    own     [hop 0]                             [last hop]
    guests          [hop 0] ... [last hop]
    links   in -----            out ------------
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxdiffusion.attention.exchanges.base import Placed
from maxdiffusion.attention.exchanges.ulysses import Ulysses, by_batch_row
from maxdiffusion.attention.geometry import Geometry
from maxdiffusion.attention.on_device import KernelSizes
from maxdiffusion.kernels.heads import HeadPlaces, Places


@dataclass(frozen=True, kw_only=True)
class UlyssesPair(Ulysses):
    """All-to-all of keys between two devices; queries go over by themselves, the others' last."""

    degree: int = 2

    def __post_init__(self) -> None:
        assert self.degree == 2, self.degree

    def places(self, batch: int, heads: int) -> HeadPlaces:
        """For each group of heads, an array with the half that stays and one with the other."""
        first, second = (self._query_places(batch, heads, device) for device in range(2))
        orders = [jnp.array(places.order(), jnp.int32) for places in (first, second)]
        return HeadPlaces(
            queries=first,
            keys=self.block_places(batch, heads),
            order=jnp.where(self._is_second(), orders[1], orders[0]),
        )

    def _query_places(self, batch: int, heads: int, device: int) -> Places:
        spots = [
            (2 * group + (half + device) % 2, 0, slot)
            for group, (start, stop) in enumerate(self.groups(batch * heads))
            for half in range(2)
            for slot in range((stop - start) // 2)
        ]
        halves = [(stop - start) // 2 for start, stop in self.groups(batch * heads)]
        return Places(
            arrays=tuple((1, half) for half in halves for _ in range(2)),
            heads=by_batch_row(spots, batch, heads),
        )

    def split(self, x: Float[Array, "1 S N H"]) -> Placed:
        """The columns of the heads that stay, and of those that go."""
        halves = jnp.split(x.reshape(*x.shape[:2], -1), 2, axis=2)
        return self._own_first(halves[0], halves[1])

    def arrived(self, placed: Placed) -> Placed:
        """This device's queries, and the other's."""
        own, going = placed
        return [own, self._swapped(going)]

    def sent_back(self, outs: Placed) -> Placed:
        """The output of this device's queries: of the heads that stayed, and of the others."""
        own, guests = outs
        return [own, self._swapped(guests)]

    def join(self, placed: Placed) -> Float[Array, "1 S D"]:
        """The inverse of `split`."""
        return jnp.concatenate(self._own_first(placed[0], placed[1]), axis=2)

    def _own_first(self, first: Array, second: Array) -> list[Array]:
        """Halves of the first and of the second device, this one's first; its own inverse."""
        swap = self._is_second()
        return [jnp.where(swap, second, first), jnp.where(swap, first, second)]

    def _is_second(self) -> Bool[Array, ""]:
        return jax.lax.axis_index(self.axes) == 1

    def _swapped(self, x: Float[Array, "1 S D"]) -> Float[Array, "1 S D"]:
        return jax.lax.ppermute(x, self.axes, [(0, 1), (1, 0)])

    def kernel_sizes(self, geometry: Geometry) -> KernelSizes:
        """Calls for the tokens of one device, for each group of heads twice."""
        together = super().kernel_sizes(geometry)
        return KernelSizes(
            batch=together.batch,
            heads=tuple(heads for heads in together.heads for _ in range(2)),
            q_len=together.q_len // 2,
            kv_len=together.kv_len,
        )

    def title(self) -> str:
        """What moves, in a few words."""
        return f"{super().title()}; queries of the other device under calls for this one's own"

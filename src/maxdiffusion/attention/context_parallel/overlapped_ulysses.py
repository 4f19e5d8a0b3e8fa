"""Ulysses between two devices around a ring, with the queries sent under the kernel calls.

Each of the two devices takes half of the heads. Keys and values are traded by an all-to-all. The
queries of the local tokens are processed first and last: the remote queries arrive under their
first kernel call, and the remote outputs return under their last.

    local   [hop 0]                             [last hop]
    remote          [hop 0] ... [last hop]
    links   in -----            out ------------
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxdiffusion.attention.context_parallel.base import Collective, ScatteredHeads
from maxdiffusion.attention.context_parallel.ulysses import (
    AllToAllQueries,
    QueryCollectives,
    by_batch_row,
)
from maxdiffusion.attention.problem import LocalProblem
from maxdiffusion.kernels.qk_prep import HeadLayout, QKVLayout
from maxdiffusion.kernels.tpu import EVEN_TILE


@final
@dataclass(frozen=True, kw_only=True)
class OverlappedQueries(QueryCollectives):
    """Swaps the queries of two devices by permutations that run under kernel calls.

    This takes a kernel call for the tokens of each device. `query_tile` is the number of queries
    that a kernel computes at once. Where two calls fill more tiles than one call for the tokens
    of both devices, the overlap costs more than it hides (3 % of the kernel for 0.3 % of a step
    at 9,450 tokens), and `for_ulysses` returns the all-to-all.
    """

    title: ClassVar[str] = "; remote queries overlapped with local attention"
    calls_per_group: ClassVar[int] = 2

    axes: tuple[str, ...] = ()
    query_tile: int = EVEN_TILE

    def for_ulysses(
        self, axes: tuple[str, ...], degree: int, traded: LocalProblem
    ) -> QueryCollectives:
        """Returns these collectives between two devices of a ring where it needs no more tiles."""
        both = math.ceil(traded.q_len / self.query_tile)
        each = math.ceil(traded.q_len // degree / self.query_tile)
        if degree != 2 or traded.num_kv_shards == 1 or both < 2 * each:
            return AllToAllQueries(axes=axes, degree=degree)
        return replace(self, axes=axes)

    def split(self, x: Float[Array, "1 S N H"]) -> ScatteredHeads:
        """Returns the columns of the heads that stay, and of those that are sent."""
        halves = jnp.split(x.reshape(*x.shape[:2], -1), 2, axis=2)
        return self._local_first(halves[0], halves[1])

    def send(self, scattered: ScatteredHeads) -> ScatteredHeads:
        """Returns the local queries and the remote ones."""
        local, remote = scattered
        return [local, self._swap(remote)]

    def send_back(self, outs: ScatteredHeads) -> ScatteredHeads:
        """Returns the outputs of the local queries: of the heads that stayed, and of the others."""
        local, remote = outs
        return [local, self._swap(remote)]

    def join(self, scattered: ScatteredHeads) -> Float[Array, "1 S D"]:
        """Returns the inverse of `split`."""
        return jnp.concatenate(self._local_first(scattered[0], scattered[1]), axis=2)

    def layout(self, blocks: HeadLayout, groups: Sequence[tuple[int, int]]) -> QKVLayout:
        """Returns, for each group of heads, an array with the half that stays and one to send."""
        first, second = (self._query_layout(blocks, groups, device) for device in range(2))
        orders = [jnp.array(layout.order(), jnp.int32) for layout in (first, second)]
        return QKVLayout(
            queries=first,
            keys=blocks,
            order=jnp.where(self._is_second(), orders[1], orders[0]),
        )

    def _query_layout(
        self, blocks: HeadLayout, groups: Sequence[tuple[int, int]], device: int
    ) -> HeadLayout:
        positions = [
            (2 * group + (half + device) % 2, 0, slot)
            for group, (start, stop) in enumerate(groups)
            for half in range(2)
            for slot in range((stop - start) // 2)
        ]
        halves = [(stop - start) // 2 for start, stop in groups]
        return HeadLayout(
            arrays=tuple((1, half) for half in halves for _ in range(2)),
            heads=by_batch_row(positions, blocks.batch, blocks.head_count),
        )

    def collectives(
        self, axes: tuple[str, ...], degree: int, traded: LocalProblem
    ) -> tuple[Collective, ...]:
        """Returns the all-to-alls of k and v and the permutations of queries and outputs.

        Keys travel under the product of the values, and these under that of the queries.
        """
        groups = len(traded.heads)
        return (
            Collective(
                kind="all-to-all",
                axes=axes,
                count=2 * groups,
                bytes=2 * traded.kv_bytes * (degree - 1) // degree,
                rounds=2,
                round_bytes=traded.kv_bytes,
                hidden=1.0,
            ),
            Collective(
                kind="collective-permute",
                axes=axes,
                count=2 * groups,
                bytes=2 * (traded.q_bytes // 2),
                rounds=2,
                round_bytes=traded.q_bytes // 2,
                # A call for the local tokens has half of the queries.
                overlap=0.5,
            ),
        )

    def _local_first(self, first: Array, second: Array) -> list[Array]:
        """Returns the halves of both devices, this device's first; it is its own inverse."""
        swap = self._is_second()
        return [jnp.where(swap, second, first), jnp.where(swap, first, second)]

    def _is_second(self) -> Bool[Array, ""]:
        return jax.lax.axis_index(self.axes) == 1

    def _swap(self, x: Float[Array, "1 S D"]) -> Float[Array, "1 S D"]:
        swapped: Array = jax.lax.ppermute(x, self.axes, [(0, 1), (1, 0)])
        return swapped

"""Exchanges for a mesh: names that want one axis get the whole context, degrees of 1 drop out."""

import math

from maxdiffusion.attention.exchanges.base import Exchange, Gather, HeadsAtHome, Stay
from maxdiffusion.attention.exchanges.bidirectional import BidirectionalRing
from maxdiffusion.attention.exchanges.by_xla import ByXla
from maxdiffusion.attention.exchanges.ring import Ring
from maxdiffusion.attention.exchanges.ulysses import Ulysses
from maxdiffusion.attention.exchanges.ulysses_pair import UlyssesPair
from maxdiffusion.attention.geometry import Geometry
from maxdiffusion.attention.options import QUERIES_AT_ONCE
from maxdiffusion.mesh import CONTEXT_AXES


def by_xla(geometry: Geometry, chunks: int) -> ByXla:
    """The compiler's own exchange, on any mesh."""
    del geometry, chunks
    return ByXla()


def gathered(geometry: Geometry, chunks: int) -> Exchange:
    """k and v collected over the whole context."""
    del chunks
    if geometry.shape.context == 1:
        return Stay()
    return Gather(axes=CONTEXT_AXES, degree=geometry.shape.context)


def whole_ring(geometry: Geometry, chunks: int) -> Exchange:
    """One ring over the whole context, however it is split."""
    del chunks
    if geometry.shape.context == 1:
        return Stay()
    return Ring(axes=CONTEXT_AXES, degree=geometry.shape.context)


def whole_ulysses(geometry: Geometry, chunks: int) -> Exchange:
    """One all-to-all over the whole context, however it is split."""
    return _ulysses(CONTEXT_AXES, geometry.shape.context, chunks, Stay())


def ulysses_ring(geometry: Geometry, chunks: int) -> Exchange:
    """All-to-all over the ulysses axis, rotation over the ring axis."""
    ring, ulysses = geometry.shape.ring, geometry.shape.ulysses
    inner: HeadsAtHome = Stay() if ring == 1 else Ring(axes=("ring",), degree=ring)
    return _ulysses(("ulysses",), ulysses, chunks, inner)


def ulysses_pair_ring(geometry: Geometry, chunks: int) -> Exchange:
    """The same, forward only; between two devices with queries that nobody waits for.

    That takes calls for the tokens of each device. Where those fill more tiles than the tokens of
    both, it costs more than it hides: 3 % of the kernel for 0.3 % of a step at 9,450 tokens.
    """
    tokens = geometry.padded_q_len // geometry.shape.context
    paired = geometry.shape.ulysses == 2 and geometry.shape.ring > 1
    if not paired or _tiles(2 * tokens) < 2 * _tiles(tokens):
        return ulysses_ring(geometry, chunks)
    ring = Ring(axes=("ring",), degree=geometry.shape.ring)
    return UlyssesPair(axes=("ulysses",), chunks=chunks, inner=ring)


def _tiles(queries: int) -> int:
    return math.ceil(queries / QUERIES_AT_ONCE)


def ulysses_line(geometry: Geometry, chunks: int) -> Exchange:
    """All-to-all over the ulysses axis, two opposite streams over the ring axis."""
    ring, ulysses = geometry.shape.ring, geometry.shape.ulysses
    inner: HeadsAtHome = Stay() if ring == 1 else BidirectionalRing(axes=("ring",), degree=ring)
    return _ulysses(("ulysses",), ulysses, chunks, inner)


def _ulysses(axes: tuple[str, ...], degree: int, chunks: int, inner: HeadsAtHome) -> Exchange:
    if degree == 1:
        return inner
    return Ulysses(axes=axes, degree=degree, chunks=chunks, inner=inner)

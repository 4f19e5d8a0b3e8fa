"""Exchanges for a mesh: names that want one axis get the whole context, degrees of 1 drop out."""

from maxdiffusion.attention.exchanges.base import Exchange, Gather, Stay
from maxdiffusion.attention.exchanges.bidirectional import BidirectionalRing
from maxdiffusion.attention.exchanges.by_xla import ByXla
from maxdiffusion.attention.exchanges.ring import Ring
from maxdiffusion.attention.exchanges.ulysses import Ulysses
from maxdiffusion.mesh import CONTEXT_AXES
from maxdiffusion.mesh.axes import MeshShape


def by_xla(shape: MeshShape, chunks: int) -> ByXla:
    """The compiler's own exchange, on any mesh."""
    del shape, chunks
    return ByXla()


def gathered(shape: MeshShape, chunks: int) -> Exchange:
    """k and v collected over the whole context."""
    del chunks
    if shape.context == 1:
        return Stay()
    return Gather(axes=CONTEXT_AXES, degree=shape.context)


def whole_ring(shape: MeshShape, chunks: int) -> Exchange:
    """One ring over the whole context, however it is split."""
    del chunks
    if shape.context == 1:
        return Stay()
    return Ring(axes=CONTEXT_AXES, degree=shape.context)


def whole_ulysses(shape: MeshShape, chunks: int) -> Exchange:
    """One all-to-all over the whole context, however it is split."""
    return _ulysses(CONTEXT_AXES, shape.context, chunks, Stay())


def ulysses_ring(shape: MeshShape, chunks: int) -> Exchange:
    """All-to-all over the ulysses axis, rotation over the ring axis."""
    inner = Stay() if shape.ring == 1 else Ring(axes=("ring",), degree=shape.ring)
    return _ulysses(("ulysses",), shape.ulysses, chunks, inner)


def ulysses_line(shape: MeshShape, chunks: int) -> Exchange:
    """All-to-all over the ulysses axis, two opposite streams over the ring axis."""
    inner = Stay() if shape.ring == 1 else BidirectionalRing(axes=("ring",), degree=shape.ring)
    return _ulysses(("ulysses",), shape.ulysses, chunks, inner)


def _ulysses(axes: tuple[str, ...], degree: int, chunks: int, inner: Exchange) -> Exchange:
    if degree == 1:
        return inner
    return Ulysses(axes=axes, degree=degree, chunks=chunks, inner=inner)

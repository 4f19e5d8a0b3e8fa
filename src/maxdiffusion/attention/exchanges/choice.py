"""Exchanges for a mesh: names that want one axis get the whole context, degrees of 1 drop out."""

from maxdiffusion.attention.exchanges.base import Exchange, Gather, Stay
from maxdiffusion.mesh import CONTEXT_AXES
from maxdiffusion.mesh.axes import MeshShape


def gathered(shape: MeshShape, chunks: int) -> Exchange:
    """k and v collected over the whole context."""
    del chunks
    if shape.context == 1:
        return Stay()
    return Gather(axes=CONTEXT_AXES, degree=shape.context)

"""From the columns that a projection writes to heads that lie where an exchange wants them.

columns    Columns: a projection's output, and the norm and rotation that make heads of it
places     Places: where every head of every batch row goes
reference  the same as plain array code, differentiable, for any devices
fused      one pass over HBM on a TPU: norm, rotation and the move together
"""

from maxdiffusion.kernels.heads.columns import Columns
from maxdiffusion.kernels.heads.fused import join_heads, place_heads
from maxdiffusion.kernels.heads.places import HeadPlaces, Places
from maxdiffusion.kernels.heads.reference import heads_of, rms_norm, rotate

__all__ = [
    "Columns",
    "HeadPlaces",
    "Places",
    "heads_of",
    "join_heads",
    "place_heads",
    "rms_norm",
    "rotate",
]

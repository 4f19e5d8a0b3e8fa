"""Context-parallel schemes: the only code of an attention that issues collectives."""

from maxdiffusion.attention.context_parallel.base import (
    AllGatherKV,
    AutoSharded,
    Collective,
    ContextParallel,
    LocalKV,
    Partitioning,
)
from maxdiffusion.attention.context_parallel.bidirectional import BidirectionalRing
from maxdiffusion.attention.context_parallel.overlapped_ulysses import OverlappedQueries
from maxdiffusion.attention.context_parallel.ring import Ring
from maxdiffusion.attention.context_parallel.ulysses import AllToAllQueries, Ulysses

__all__ = [
    "AllGatherKV",
    "AllToAllQueries",
    "AutoSharded",
    "BidirectionalRing",
    "Collective",
    "ContextParallel",
    "LocalKV",
    "OverlappedQueries",
    "Partitioning",
    "Ring",
    "Ulysses",
]

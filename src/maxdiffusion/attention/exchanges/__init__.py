"""Exchanges between the devices that share a sequence: the only code that knows collectives."""

from maxdiffusion.attention.exchanges.base import Exchange, Gather, Stay
from maxdiffusion.attention.exchanges.bidirectional import BidirectionalRing
from maxdiffusion.attention.exchanges.by_xla import ByXla
from maxdiffusion.attention.exchanges.ring import Ring
from maxdiffusion.attention.exchanges.ulysses import Ulysses
from maxdiffusion.attention.exchanges.ulysses_pair import UlyssesPair

__all__ = [
    "BidirectionalRing",
    "ByXla",
    "Exchange",
    "Gather",
    "Ring",
    "Stay",
    "Ulysses",
    "UlyssesPair",
]

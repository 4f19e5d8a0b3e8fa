"""Exchanges between the devices that share a sequence: the only code that knows collectives."""

from maxdiffusion.attention.exchanges.base import Exchange, Gather, KernelSizes, Stay
from maxdiffusion.attention.exchanges.by_xla import ByXla

__all__ = ["ByXla", "Exchange", "Gather", "KernelSizes", "Stay"]

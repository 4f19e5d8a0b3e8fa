"""The UMT5 text encoder of WAN."""

from maxdiffusion.models.umt5.config import Umt5Config
from maxdiffusion.models.umt5.encoder import Umt5Encoder

__all__ = ["Umt5Config", "Umt5Encoder"]

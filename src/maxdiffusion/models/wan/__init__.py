"""The WAN video transformer, 2.1 and 2.2."""

from maxdiffusion.models.wan.block import TextKeysValues
from maxdiffusion.models.wan.conditioning import Conditioning, ControlInput
from maxdiffusion.models.wan.config import WanTransformerConfig
from maxdiffusion.models.wan.transformer import WanTransformer

__all__ = [
    "Conditioning",
    "ControlInput",
    "TextKeysValues",
    "WanTransformer",
    "WanTransformerConfig",
]

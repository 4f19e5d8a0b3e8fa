"""The WAN video transformer, 2.1 and 2.2."""

from maxdiffusion.models.wan.block import TextKeysValues
from maxdiffusion.models.wan.config import (
    WanTransformerConfig,
    wan_2_1_t2v_1_3b,
    wan_2_1_t2v_14b,
    wan_2_2_i2v_a14b,
    wan_2_2_t2v_a14b,
)
from maxdiffusion.models.wan.transformer import WanTransformer

__all__ = [
    "TextKeysValues",
    "WanTransformer",
    "WanTransformerConfig",
    "wan_2_1_t2v_1_3b",
    "wan_2_1_t2v_14b",
    "wan_2_2_i2v_a14b",
    "wan_2_2_t2v_a14b",
]

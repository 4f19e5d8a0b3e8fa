"""Fused qk-norm, RoPE and head layout: from a projection's columns to the heads of a collective.

layout      ProjectedHeads, HeadLayout, QKVLayout, and the reference as plain array code
pallas_tpu  qk_norm_rope_scatter and gather_heads: one pass over HBM on a TPU
"""

from maxdiffusion.kernels.qk_prep.layout import (
    HeadLayout,
    ProjectedHeads,
    QKVLayout,
    heads_of,
    rms_norm,
    rotate,
)
from maxdiffusion.kernels.qk_prep.pallas_tpu import gather_heads, qk_norm_rope_scatter

__all__ = [
    "HeadLayout",
    "ProjectedHeads",
    "QKVLayout",
    "gather_heads",
    "heads_of",
    "qk_norm_rope_scatter",
    "rms_norm",
    "rotate",
]

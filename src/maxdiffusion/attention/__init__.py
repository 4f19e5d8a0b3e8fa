"""Attention over split sequences: registry of modes, plans, context parallelism, backends."""

from maxdiffusion.attention.options import AttentionOptions
from maxdiffusion.attention.plan import (
    Attention,
    AttentionPlan,
    BlockAttention,
    plan_attention,
    plan_cross_attention,
    with_gradient,
)
from maxdiffusion.attention.problem import AttentionProblem, UnsupportedAttention
from maxdiffusion.attention.registry import ATTENTION_NAMES
from maxdiffusion.kernels.tpu import BlockSizes

__all__ = [
    "ATTENTION_NAMES",
    "Attention",
    "AttentionOptions",
    "AttentionPlan",
    "AttentionProblem",
    "BlockAttention",
    "BlockSizes",
    "UnsupportedAttention",
    "plan_attention",
    "plan_cross_attention",
    "with_gradient",
]

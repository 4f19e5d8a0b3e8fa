"""Attention over split sequences: names, plans, exchanges between devices, kernels on them."""

from maxdiffusion.attention.modes import ATTENTION_NAMES
from maxdiffusion.attention.options import AttentionOptions, FlashBlockSizes
from maxdiffusion.attention.plan import AttentionPlan
from maxdiffusion.attention.planning import (
    BlockAttention,
    plan_attention,
    plan_cross_attention,
    with_gradient,
)
from maxdiffusion.attention.problem import AttentionProblem
from maxdiffusion.attention.refusal import UnsupportedAttention

__all__ = [
    "ATTENTION_NAMES",
    "AttentionOptions",
    "AttentionPlan",
    "AttentionProblem",
    "BlockAttention",
    "FlashBlockSizes",
    "UnsupportedAttention",
    "plan_attention",
    "plan_cross_attention",
    "with_gradient",
]

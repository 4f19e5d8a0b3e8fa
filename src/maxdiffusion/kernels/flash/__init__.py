"""Our Pallas TPU flash attention: one device, [B, S, N, H] in and out.

blocks   FlashBlocks: tile sizes and their rules     options    FlashOptions: softmax, exponent
shape    FlashShape: sizes of a call                 checks     plan_kernel: refuse or plan
vmem     VMEM need by arithmetic                     fixed_m    bound, gate, key smoothing
inputs   layouts, key lengths and masks              call       the pallas_call
fp8      Q.K^T in float8 (lossy)                      fp8_keys   keys in two float8 pieces
coarse   exponentials that suffice for it
body     what one grid step does                     reference  the same in dense float32
"""

from maxdiffusion.kernels.flash.api import flash_attention, flash_attention_partials
from maxdiffusion.kernels.flash.blocks import FlashBlocks, UnsupportedFlash
from maxdiffusion.kernels.flash.checks import plan_kernel
from maxdiffusion.kernels.flash.fixed_m import (
    FixedMBounds,
    KeyNorms,
    Keys,
    KeyTotal,
    fixed_m_bounds,
    gate_heads,
    key_norms,
    key_total,
    query_norm,
    smooth_keys,
)
from maxdiffusion.kernels.flash.fp8 import KeyRange, key_range
from maxdiffusion.kernels.flash.fp8_keys import Fp8Keys, fp8_keys, split_keys
from maxdiffusion.kernels.flash.options import (
    Exponent,
    FixedM,
    FlashOptions,
    Gate,
    Online,
    Product,
    Scheduler,
)
from maxdiffusion.kernels.flash.partials import Partials
from maxdiffusion.kernels.flash.plan import KernelPlan
from maxdiffusion.kernels.flash.reference import reference_attention, reference_partials
from maxdiffusion.kernels.flash.shape import FlashShape

__all__ = [
    "Exponent",
    "FixedM",
    "FixedMBounds",
    "FlashBlocks",
    "FlashOptions",
    "FlashShape",
    "Fp8Keys",
    "Gate",
    "KernelPlan",
    "KeyNorms",
    "KeyRange",
    "KeyTotal",
    "Keys",
    "Online",
    "Partials",
    "Product",
    "Scheduler",
    "UnsupportedFlash",
    "fixed_m_bounds",
    "flash_attention",
    "flash_attention_partials",
    "fp8_keys",
    "gate_heads",
    "key_norms",
    "key_range",
    "key_total",
    "plan_kernel",
    "query_norm",
    "reference_attention",
    "reference_partials",
    "smooth_keys",
    "split_keys",
]

"""Pallas TPU flash attention: one device, [B, S, N, H] in and out.

api     flash_attention and its reference: layouts and the pallas_call
config  options and array sizes of a call           plan     frozen description of a call
body    one grid step                               tiles    unmasked and masked tiles
vmem    VMEM by arithmetic; plan_kernel refuses     fixed_m  bound, gate, key smoothing
fp8     Q.K^T in float8 (lossy)                     backward*  its gradient: plan, body, call
free_depth  K Q^T that subtracts the shift          resident  few keys, all of them in VMEM
"""

from maxdiffusion.kernels.flash.api import (
    flash_attention,
    flash_attention_partials,
    flash_attention_with_log_sum,
    reference_attention,
    reference_partials,
)
from maxdiffusion.kernels.flash.config import (
    Exponent,
    FixedM,
    FlashOptions,
    FlashShape,
    Gate,
    Online,
    Product,
    Scheduler,
)
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
from maxdiffusion.kernels.flash.fp8 import Fp8Keys, KeyRange, fp8_keys, key_range, split_keys
from maxdiffusion.kernels.flash.plan import KernelPlan
from maxdiffusion.kernels.flash.vmem import plan_kernel

__all__ = [
    "Exponent",
    "FixedM",
    "FixedMBounds",
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
    "Product",
    "Scheduler",
    "fixed_m_bounds",
    "flash_attention",
    "flash_attention_partials",
    "flash_attention_with_log_sum",
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

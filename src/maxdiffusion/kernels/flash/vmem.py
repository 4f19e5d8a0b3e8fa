"""How much VMEM a kernel call needs, by arithmetic, and whether a chip has it."""

from collections.abc import Sequence

from maxdiffusion.kernels.flash.plan import KernelPlan
from maxdiffusion.runtime.problems import Problem

MIB = 2**20
CHIPS = {"tpu7x": 64 * MIB, "v6e": 128 * MIB, "v5p": 64 * MIB, "v5e": 128 * MIB}
"""VMEM of one TensorCore."""


def vmem_limit(plan: KernelPlan) -> int:
    """Returns what the compiler may use."""
    return plan.blocks.vmem_limit_bytes or CHIPS[plan.options.chip]


def vmem_problems(plan: KernelPlan) -> Sequence[Problem]:
    return []

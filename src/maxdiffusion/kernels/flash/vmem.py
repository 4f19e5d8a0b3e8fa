"""How much VMEM a kernel call needs, by arithmetic, and whether a chip has it.

Blocks and scratch are exact, to the byte what the compiler allocates. Beside them it keeps scores
and probabilities of the tile that is being worked on, as its scheduler sees fit (`spill`).
"""

from collections.abc import Sequence

from maxdiffusion.kernels.flash.blocks import LANES, round_up
from maxdiffusion.kernels.flash.plan import KernelPlan
from maxdiffusion.kernels.flash.spill import MIB, spill_bytes
from maxdiffusion.kernels.flash.step import SUBLANES
from maxdiffusion.runtime.problems import Problem

CHIPS = {"tpu7x": 64 * MIB, "v6e": 128 * MIB, "v5p": 64 * MIB, "v5e": 128 * MIB}
"""VMEM of one TensorCore."""
MARGIN = 1.08
"""What the compiler is allowed beyond the computed need, when no limit is given."""


def block_bytes(plan: KernelPlan) -> int:
    """Returns the bytes of all blocks, each held twice so that the next arrives during work."""
    heads, kv_heads = plan.blocks.heads_per_tile, plan.kv_heads_per_tile
    width = round_up(plan.shape.head_dim, LANES) * plan.shape.itemsize
    queries, keys = plan.blocks.block_q * heads * width, plan.blocks.block_kv * kv_heads * width
    depth = round_up(plan.product_depth, LANES) * plan.product_dtype.itemsize
    products = plan.blocks.block_kv * kv_heads * depth
    sums = plan.blocks.block_q * heads * (round_up(plan.shape.head_dim, LANES) + 2) * 4
    out = sums if plan.partials else queries
    carried = sums if plan.carried else 0
    mask = plan.blocks.block_kv * 4 if plan.masked else 0
    return 2 * (queries + products + keys + out + carried + mask)


def scratch_bytes(plan: KernelPlan) -> int:
    """Returns the bytes of the scaled queries and of the state, kept once and saved once."""
    head_dim = plan.shape.head_dim
    state = 2 * head_dim + 2 * SUBLANES + 3 + plan.fp8
    per_query = plan.product_depth * plan.product_dtype.itemsize + state * 4
    return plan.blocks.heads_per_tile * plan.blocks.block_q * per_query


def vmem_bytes(plan: KernelPlan) -> int:
    """Returns the VMEM that this call needs."""
    return block_bytes(plan) + scratch_bytes(plan) + spill_bytes(plan)


def vmem_limit(plan: KernelPlan) -> int:
    """Returns what the compiler may use: the limit given, else little more than the need.

    What the kernel does not claim, XLA fills with operands of the operations around it.
    """
    given = plan.blocks.vmem_limit_bytes
    if given is not None:
        return given
    return min(int(vmem_bytes(plan) * MARGIN) + MIB, CHIPS[plan.options.chip])


def vmem_problems(plan: KernelPlan) -> Sequence[Problem]:
    """Returns why this call does not fit, if it does not."""
    chip, given = plan.options.chip, plan.blocks.vmem_limit_bytes
    if chip not in CHIPS:
        known = ", ".join(CHIPS)
        rule, remedy = f"must be one of {known}", "Name the chip that the program is compiled for"
        return [Problem(name="chip", value=chip, rule=rule, remedy=remedy)]
    problems = []
    if given is not None and given > CHIPS[chip]:
        rule = f"must not exceed the {CHIPS[chip]} bytes of VMEM of a {chip}"
        remedy = f"Use at most {CHIPS[chip]}"
        problems.append(Problem(name="vmem_limit_bytes", value=given, rule=rule, remedy=remedy))
    need, room = vmem_bytes(plan), min(given or CHIPS[chip], CHIPS[chip])
    if need > room:
        blocks = f"block_q={plan.blocks.block_q}, block_kv={plan.blocks.block_kv}"
        rule = f"needs {need / MIB:.1f} MiB of VMEM, more than the {room / MIB:.1f} MiB it may use"
        remedy = "Use a smaller block_q, block_kv or heads_per_tile"
        if need <= CHIPS[chip]:
            remedy += f", or raise vmem_limit_bytes to {need}"
        problems.append(Problem(name="blocks", value=blocks, rule=rule, remedy=remedy))
    return problems

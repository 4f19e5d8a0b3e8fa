"""One place where a call is refused, before anything is traced, with every reason."""

from maxdiffusion.kernels.flash.blocks import FlashBlocks, UnsupportedFlash
from maxdiffusion.kernels.flash.fixed_m import KEYS_BITS
from maxdiffusion.kernels.flash.options import FixedM, FlashOptions
from maxdiffusion.kernels.flash.plan import KernelPlan
from maxdiffusion.kernels.flash.shape import FlashShape, shape_problems
from maxdiffusion.kernels.flash.vmem import vmem_problems
from maxdiffusion.runtime.problems import Problem


def plan_kernel(
    shape: FlashShape,
    blocks: FlashBlocks,
    options: FlashOptions,
    *,
    masked: bool = False,
    lengths: bool = False,
    partials: bool = False,
    carried: bool = False,
) -> KernelPlan:
    """Returns the plan of a call, or raises `UnsupportedFlash` with every reason against it.

    `masked` and `lengths` say whether the call has a key mask and key lengths, `partials` whether
    it returns unnormalised sums, `carried` whether it starts from those of an earlier call.
    """
    problems = list(shape_problems(shape, blocks)) + _option_problems(shape, options)
    if problems:
        raise UnsupportedFlash(problems)
    plan = KernelPlan(
        shape=shape,
        blocks=blocks.fit(shape.q_len, shape.kv_len),
        options=options,
        masked=masked,
        lengths=lengths,
        partials=partials,
        carried=carried,
    )
    if too_much := vmem_problems(plan):
        raise UnsupportedFlash(too_much)
    return plan


def _option_problems(shape: FlashShape, options: FlashOptions) -> list[Problem]:
    if isinstance(options.softmax, FixedM) and shape.kv_len > 2**KEYS_BITS:
        return [
            Problem(
                name="kv_len",
                value=shape.kv_len,
                rule=f"must be at most {2**KEYS_BITS} for fixed-m softmax",
                remedy="Use Online()",
            )
        ]
    return []

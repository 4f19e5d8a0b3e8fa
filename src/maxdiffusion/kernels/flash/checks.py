"""One place where a call is refused, before anything is traced, with every reason."""

from maxdiffusion.kernels.flash.blocks import FlashBlocks, UnsupportedFlash
from maxdiffusion.kernels.flash.fixed_m import KEYS_BITS
from maxdiffusion.kernels.flash.fp8 import CHIPS as FP8_CHIPS
from maxdiffusion.kernels.flash.options import FixedM, FlashOptions, Product
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
    if options.product is Product.FP8 and options.chip not in FP8_CHIPS and not options.interpret:
        return [
            Problem(
                name="chip",
                value=options.chip,
                rule=f"multiplies float8 no faster than bfloat16; {', '.join(FP8_CHIPS)} does",
                remedy="Use Product.NATIVE, by a name without fp8",
            )
        ]
    if options.product is Product.FP8 and isinstance(options.softmax, FixedM):
        return [
            Problem(
                name="product",
                value=options.product,
                rule="goes with online softmax: norms of rounded queries are no bound",
                remedy="Use Online(), or Product.NATIVE",
            )
        ]
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

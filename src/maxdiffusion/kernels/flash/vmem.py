"""VMEM of a kernel call: blocks and scratch to the byte, compiler spills by its own figures.

A tile's scores and probabilities do not fit the 64 registers of a core; the others are spilled to
VMEM. Their number depends on the compiler's scheduler, so it is not derived: these are the fewest
rules that give, to 5 %, every total that libtpu 0.0.42 reports for some 160 tiles on tpu7x (and a
few on v6e, which agree).

    unmasked  the transposed values where the product subtracts the shift; otherwise nearly all
              scores that are alive at once, 4 bytes each, less what is used up by then
    masked    a table: tiles of 128 to 512 keys and queries are all there are
    start     the scores of the first 128 keys, which give the first shift

They are never at work at the same time, so the largest counts.

How much VMEM a kernel call needs, by arithmetic, and whether a chip has it.

Blocks and scratch are exact to the byte. On top of them the compiler keeps scores and probabilities
of the current tile, as its scheduler sees fit (`spill`).

One place where a call is refused, before anything is traced, with every reason.
"""

from collections.abc import Sequence

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.kernels.flash.config import (
    FixedM,
    FlashOptions,
    FlashShape,
    Product,
    shape_problems,
)
from maxdiffusion.kernels.flash.fixed_m import KEYS_BITS
from maxdiffusion.kernels.flash.fp8 import CHIPS as FP8_CHIPS
from maxdiffusion.kernels.flash.plan import KernelPlan
from maxdiffusion.kernels.flash.tiles import MASKED_TILE
from maxdiffusion.kernels.tpu import (
    EVEN_TILE,
    LANES,
    MIB,
    SUBLANES,
    VMEM_BYTES,
    BlockSizes,
    largest_divisor,
    round_up,
)

# MiB by queries (128 to 512, row by row) and keys (128 to 512) of a masked tile.
MASKED_MIB = {
    "bfloat16": (
        (0.00, 0.00, 0.04, 0.21),
        (0.00, 0.14, 0.39, 0.72),
        (0.06, 0.28, 0.76, 1.02),
        (0.14, 0.56, 0.92, 1.24),
    ),
    "bfloat16, masked": (
        (0.00, 0.00, 0.06, 0.16),
        (0.00, 0.18, 0.23, 0.39),
        (0.06, 0.34, 0.48, 0.70),
        (0.14, 0.45, 0.75, 1.07),
    ),
    "float32": (
        (0.15, 0.36, 0.62, 0.80),
        (0.22, 0.53, 0.91, 1.13),
        (0.41, 0.93, 1.25, 1.85),
        (0.54, 1.04, 1.44, 1.71),
    ),
}
REGISTER_BYTES = 64 * SUBLANES * LANES * 4
"""Bytes of the registers of a core. Weights that fit half of them never reach VMEM."""
FP8_QUERIES = 256
"""Queries whose products in float8 come one by one as fast as their exponentials are made."""
# float32 matmuls keep the parts that they split their operands into, and widths differ: bytes per
# score of a tile of this many queries.
FLOAT32_BYTES = {128: 6.0, 256: 5.7, 384: 9.1, 640: 8.2, 768: 7.0, 896: 7.2, 1152: 7.8, 1280: 8.2}


def spill_bytes(plan: KernelPlan) -> int:
    """Returns the VMEM that the compiler uses on top of the blocks and the scratch of a call."""
    return int(MIB * max(_unmasked(plan), _masked(plan), _start(plan.blocks)))


def _masked(plan: KernelPlan) -> float:
    sizes = (plan.blocks.block_q, plan.blocks.block_kv)
    queries, keys = (largest_divisor(size, MASKED_TILE, LANES) for size in sizes)
    masked = f"{plan.shape.dtype}, masked"
    kind = masked if plan.masked and masked in MASKED_MIB else plan.shape.dtype
    return MASKED_MIB[kind][queries // LANES - 1][keys // LANES - 1]


def _start(blocks: BlockSizes) -> float:
    return min(0.35, max(0.0, 4 * LANES * blocks.block_q / MIB - 0.16))


def _unmasked(plan: KernelPlan) -> float:
    """Returns the spills of the main loop.

    A shorter last tile after a loop over the others is code of its own, whose share comes on top; a
    loop of one turn is no loop to the compiler, which then schedules both tiles as one.
    """
    blocks = plan.blocks
    if plan.fp8 and blocks.q_tile <= FP8_QUERIES:
        return 0.0
    if plan.shift_in_product:
        # Nothing but the values, transposed; and not even those next to weights in registers.
        values = blocks.block_kv * plan.shape.head_dim * plan.shape.itemsize
        return values / MIB if weights_bytes(plan) else 0.0
    turns, rest = divmod(blocks.block_q, blocks.q_tile)
    parts = [_tile(plan, queries) for queries in (blocks.q_tile, rest) if queries]
    if turns > 1:
        return sum(parts)
    interleaved = 0.25 + blocks.block_kv / 4096 if rest % EVEN_TILE else 0.0
    return max(0.0, max(parts) - interleaved)


def _tile(plan: KernelPlan, queries: int) -> float:
    blocks = plan.blocks
    alive = queries * live_score_keys(blocks) / MIB
    if plan.shape.dtype == "float32":
        return alive * _float32_bytes(queries)
    return max(0.0, 4 * alive - _used_up(queries, blocks.block_kv, folded=plan.folded))


def live_score_keys(blocks: BlockSizes) -> int:
    """Returns the number of keys of a block whose scores are live at once.

    The scores of the next tile are made while those of this one are used; in steps smaller than a
    tile they are used up as the next ones come.
    """
    compute, inner = blocks.block_kv_compute, blocks.block_kv_compute_in
    alive = max(2 * compute, 3 * compute - 256) if inner == compute else compute + LANES
    return blocks.block_kv if compute == blocks.block_kv else min(blocks.block_kv, alive)


def _used_up(queries: int, keys: int, *, folded: bool) -> float:
    if queries == EVEN_TILE:
        return 0.95 + 0.42 * min(1.0, max(0, keys - 1024) / 1024)
    even = 1.45 - 0.17 * queries / 1024
    if queries % EVEN_TILE == 0:
        return even
    narrow = (0.0 if folded else 0.35) + (0.13 if queries <= 768 else 0.0)
    return even + 0.5 * max(0, keys - 512) / 1024 - narrow


def _float32_bytes(queries: int) -> float:
    if queries % EVEN_TILE == 0:
        return 4.7 + 0.8 * queries / 1024
    return FLOAT32_BYTES.get(queries, 7.8)


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
    out += plan.blocks.block_q * heads * 4 if plan.log_sum else 0
    carried = sums if plan.carried else 0
    mask = plan.blocks.block_kv * 4 if plan.masked else 0
    return 2 * (queries + products + keys + out + carried + mask)


def scratch_bytes(plan: KernelPlan) -> int:
    """Returns the bytes of the scaled queries, of the state, kept once and saved once, and of the
    weights of a tile where they are kept."""
    head_dim = plan.shape.head_dim
    state = 2 * head_dim + 2 * SUBLANES + 3 + plan.fp8
    per_query = plan.product_depth * plan.product_dtype.itemsize + state * 4
    return plan.blocks.heads_per_tile * plan.blocks.block_q * per_query + weights_bytes(plan)


def weights_bytes(plan: KernelPlan) -> int:
    """Returns the bytes of the weights of a tile that are kept in VMEM (see `free_depth`)."""
    weights = plan.blocks.block_kv * plan.blocks.q_tile * plan.dtype.itemsize
    return weights if plan.shift_in_product and weights > REGISTER_BYTES // 2 else 0


def vmem_bytes(plan: KernelPlan) -> int:
    """Returns the VMEM that this call needs."""
    return block_bytes(plan) + scratch_bytes(plan) + spill_bytes(plan)


def vmem_limit(plan: KernelPlan) -> int:
    """Returns what the compiler may use: the limit given, else little more than the need.

    What the kernel does not claim, XLA fills with operands of the operations around it.
    """
    if plan.blocks.vmem_limit_bytes:
        return plan.blocks.vmem_limit_bytes
    return min(int(vmem_bytes(plan) * MARGIN) + MIB, VMEM_BYTES[plan.options.chip])


def vmem_problems(plan: KernelPlan) -> Sequence[Problem]:
    """Returns why this call does not fit, if it does not."""
    chip, given = plan.options.chip, plan.blocks.vmem_limit_bytes
    if chip not in VMEM_BYTES:
        known = ", ".join(VMEM_BYTES)
        rule, remedy = f"must be one of {known}", "Name the chip that the program is compiled for"
        return [Problem(name="chip", value=chip, rule=rule, remedy=remedy)]
    problems = []
    if given > VMEM_BYTES[chip]:
        rule = f"must not exceed the {VMEM_BYTES[chip]} bytes of VMEM of a {chip}"
        remedy = f"Use at most {VMEM_BYTES[chip]}"
        problems.append(Problem(name="vmem_limit_bytes", value=given, rule=rule, remedy=remedy))
    need, room = vmem_bytes(plan), min(given or VMEM_BYTES[chip], VMEM_BYTES[chip])
    if need > room:
        blocks = f"block_q={plan.blocks.block_q}, block_kv={plan.blocks.block_kv}"
        rule = f"needs {need / MIB:.1f} MiB of VMEM, more than the {room / MIB:.1f} MiB it may use"
        remedy = "Use a smaller block_q, block_kv or heads_per_tile"
        if need <= VMEM_BYTES[chip]:
            remedy += f", or raise vmem_limit_bytes to {need}"
        problems.append(Problem(name="blocks", value=blocks, rule=rule, remedy=remedy))
    return problems


def plan_kernel(
    shape: FlashShape,
    blocks: BlockSizes,
    options: FlashOptions,
    *,
    masked: bool = False,
    lengths: bool = False,
    partials: bool = False,
    carried: bool = False,
    log_sum: bool = False,
) -> KernelPlan:
    """Returns the plan of a call, or raises `ProblemsFound` with every reason against it.

    `masked` and `lengths` say whether the call has a key mask and key lengths, `partials` whether
    it returns unnormalised sums, `carried` whether it starts from those of an earlier call,
    `log_sum` whether it returns the natural logs of its sums with the output.
    """
    problems = list(shape_problems(shape, blocks.heads_per_tile or 1))
    problems += _option_problems(shape, options)
    if problems:
        raise ProblemsFound(problems)
    plan = KernelPlan(
        shape=shape,
        blocks=blocks.fit(shape.q_len, shape.kv_len),
        options=options,
        masked=masked,
        lengths=lengths,
        partials=partials,
        carried=carried,
        log_sum=log_sum,
    )
    if too_much := vmem_problems(plan):
        raise ProblemsFound(too_much)
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

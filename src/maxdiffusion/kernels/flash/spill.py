"""What the compiler keeps of a tile in VMEM beside blocks and scratch, by its own figures.

A tile's scores and probabilities do not fit the 64 registers of a core; those that wait for their
turn lie in VMEM. How many do is up to the compiler's scheduler, so this is no derivation: it is
what libtpu 0.0.42 says of some 200 tiles on tpu7x (and a few on v6e, which are like them), put into
as few rules as give every total to 5 %.

    quick     nearly all scores that are alive at once, 4 bytes each, less what is used up by then
    careful   a table: tiles of 128 to 512 keys and queries are all there are
    start     the scores of the first 128 keys, which give the first reference

They are never at work at the same time, so the largest counts.
"""

from maxdiffusion.kernels.flash.blocks import LANES, FlashBlocks
from maxdiffusion.kernels.flash.careful import CAREFUL_TILE
from maxdiffusion.kernels.flash.plan import KernelPlan
from maxdiffusion.kernels.flash.step import largest_divisor

MIB = 2**20
# MiB by queries (128 to 512, row by row) and keys (128 to 512) of a careful tile.
CAREFUL = {
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
FP8_QUERIES = 256
"""Queries whose products in float8 come one by one as fast as their exponentials are made."""
EVEN = 512
"""Queries that two MXUs share evenly; the schedule of other widths is another one."""
# float32 matmuls keep the parts that they split their operands into, and widths differ: bytes per
# score of a tile of so many queries.
FLOAT32_BYTES = {128: 6.0, 256: 5.7, 384: 9.1, 640: 8.2, 768: 7.0, 896: 7.2, 1152: 7.8, 1280: 8.2}


def spill_bytes(plan: KernelPlan) -> int:
    """Returns what the compiler keeps in VMEM beside the blocks and the scratch of a call."""
    return int(MIB * max(_quick(plan), _careful(plan), _start(plan.blocks)))


def _careful(plan: KernelPlan) -> float:
    sizes = (plan.blocks.block_q, plan.blocks.block_kv)
    queries, keys = (largest_divisor(size, CAREFUL_TILE, LANES) for size in sizes)
    masked = f"{plan.shape.dtype}, masked"
    kind = masked if plan.masked and masked in CAREFUL else plan.shape.dtype
    return CAREFUL[kind][queries // LANES - 1][keys // LANES - 1]


def _start(blocks: FlashBlocks) -> float:
    return min(0.35, max(0.0, 4 * LANES * blocks.block_q / MIB - 0.16))


def _quick(plan: KernelPlan) -> float:
    """Returns that of the main loop.

    A shorter last tile after a loop over the others is code of its own, whose share comes on top; a
    loop of one turn is no loop to the compiler, which then schedules both tiles as one.
    """
    blocks = plan.blocks
    if plan.fp8 and blocks.q_tile <= FP8_QUERIES:
        return 0.0
    turns, rest = divmod(blocks.block_q, blocks.q_tile)
    parts = [_tile(plan, queries) for queries in (blocks.q_tile, rest) if queries]
    if turns > 1:
        return sum(parts)
    interleaved = 0.25 + blocks.block_kv / 4096 if rest % EVEN else 0.0
    return max(0.0, max(parts) - interleaved)


def _tile(plan: KernelPlan, queries: int) -> float:
    blocks = plan.blocks
    alive = queries * keys_alive(blocks) / MIB
    if plan.shape.dtype == "float32":
        return alive * _float32_bytes(queries)
    return max(0.0, 4 * alive - _used_up(queries, blocks.block_kv, folded=plan.folded))


def keys_alive(blocks: FlashBlocks) -> int:
    """Returns how many keys of a block have scores at once.

    The scores of the next tile are made while those of this one are used; in steps smaller than a
    tile they are used up as the next ones come.
    """
    compute, inner = blocks.block_kv_compute, blocks.block_kv_compute_in
    alive = max(2 * compute, 3 * compute - 256) if inner == compute else compute + LANES
    return blocks.block_kv if compute == blocks.block_kv else min(blocks.block_kv, alive)


def _used_up(queries: int, keys: int, *, folded: bool) -> float:
    if queries == EVEN:
        return 0.95 + 0.42 * min(1.0, max(0, keys - 1024) / 1024)
    even = 1.45 - 0.17 * queries / 1024
    if queries % EVEN == 0:
        return even
    narrow = (0.0 if folded else 0.35) + (0.13 if queries <= 768 else 0.0)
    return even + 0.5 * max(0, keys - 512) / 1024 - narrow


def _float32_bytes(queries: int) -> float:
    if queries % EVEN == 0:
        return 4.7 + 0.8 * queries / 1024
    return FLOAT32_BYTES.get(queries, 7.8)

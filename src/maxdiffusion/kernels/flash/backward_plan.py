"""Plan of a backward call: what its body and its pallas_call agree on, and the VMEM it needs.

The backward kernel keeps the float32 gradient of up to `block_q_dq` queries in VMEM while all keys
pass by, and those of one block of keys while all queries pass by. So every score is computed once,
and no gradient is read back from HBM. Longer sequences run as several calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.kernels.flash.config import (
    FlashOptions,
    FlashShape,
    Product,
    shape_problems,
)
from maxdiffusion.kernels.tpu import (
    LANES,
    MIB,
    VMEM_BYTES,
    BlockSizes,
    even_block,
    fitting,
    round_up,
)

MARGIN = 1.08
"""What the compiler is allowed beyond the computed need, when no limit is given."""
QUERIES_AT_ONCE = 512
"""Queries of a tile of scores: two passes of the 256 rows of an MXU for dK and dV."""
KEYS_AT_ONCE = 256
"""Keys of a tile of scores: the columns of an MXU for dK and dV."""
ROWS_PER_QUERY = 2
"""Shift and delta of a query."""


@dataclass(frozen=True, kw_only=True)
class BackwardPlan:
    """Static description of one backward call; `blocks` already fit the lengths."""

    shape: FlashShape
    blocks: BlockSizes
    options: FlashOptions
    masked: bool
    lengths: bool
    out_dtype: str

    @property
    def folded(self) -> bool:
        """Returns whether heads are columns of [B, S, N * H] or rows of [B, N, S, H]."""
        return self.shape.head_dim % LANES == 0

    @property
    def dtype(self) -> jnp.dtype:
        """Type of q, k, v, d_out and of the operands of every product."""
        return jnp.dtype(self.shape.dtype)

    @property
    def block_q(self) -> int:
        """Queries of one grid step."""
        return self.blocks.block_q_dkv

    @property
    def block_kv(self) -> int:
        """Keys of one grid step."""
        return self.blocks.block_kv_dkv

    @property
    def kv_tile(self) -> int:
        """Keys of one product for dQ."""
        return self.blocks.block_kv_dkv_compute

    @property
    def kv_step(self) -> int:
        """Keys of one tile of scores."""
        return fitting(KEYS_AT_ONCE, self.kv_tile)

    @property
    def q_tile(self) -> int:
        """Queries of one tile of scores."""
        return fitting(QUERIES_AT_ONCE, self.block_q)

    @property
    def q_blocks(self) -> int:
        """Blocks of queries of one head; the last may be ragged."""
        return -(-self.shape.q_len // self.block_q)

    @property
    def group_blocks(self) -> int:
        """Blocks of queries of all heads that share a key head."""
        return self.q_blocks * self.shape.group

    @property
    def kv_blocks(self) -> int:
        """Blocks of keys; the last may be ragged."""
        return -(-self.shape.kv_len // self.block_kv)

    @property
    def partial_keys(self) -> bool:
        """Returns whether some block of keys may hold keys that are not attended."""
        return self.masked or self.lengths or self.shape.kv_len % self.block_kv > 0

    @property
    def score_scale(self) -> float:
        """Scale of q: 1/sqrt(H), in units of the exponent."""
        return self.options.exponent.per_nat * self.q_scale

    @property
    def q_scale(self) -> float:
        """Scale of the gradient of q: 1/sqrt(H)."""
        inverse_root: float = self.shape.head_dim**-0.5
        return inverse_root


def block_bytes(plan: BackwardPlan) -> int:
    """Returns the bytes of all blocks, each held twice so that the next arrives during work."""
    lanes = round_up(plan.shape.head_dim, LANES)
    itemsize, out = plan.dtype.itemsize, jnp.dtype(plan.out_dtype).itemsize
    queries = plan.block_q * (2 * plan.shape.head_dim * itemsize + lanes * out)
    keys = plan.block_kv * lanes * 2 * (itemsize + out)
    rows = plan.block_q * ROWS_PER_QUERY * 4
    mask = plan.block_kv * 4 if plan.masked else 0
    return 2 * (queries + keys + rows + mask)


def scratch_bytes(plan: BackwardPlan) -> int:
    """Returns the bytes of the gradients in VMEM and of the operands that are kept transposed."""
    head_dim, itemsize = plan.shape.head_dim, plan.dtype.itemsize
    d_q = plan.group_blocks * plan.block_q * head_dim * 4
    d_kv = 2 * plan.block_kv * head_dim * 4
    transposed = plan.block_kv * head_dim * itemsize
    visible = 0
    if plan.partial_keys:
        lanes = round_up(head_dim, LANES)
        visible = plan.block_kv * (2 * lanes * itemsize + LANES * 4)
    return d_q + d_kv + transposed + visible


def spill_bytes(plan: BackwardPlan) -> int:
    """Returns what the compiler keeps of a tile in VMEM, from above (libtpu 0.0.42).

    dS of the keys of one product for dQ wait for it; scores and their gradients are there for the
    keys of this step and of the next. float32 products keep the parts of their operands as well.
    """
    if plan.dtype == jnp.float32:
        return plan.q_tile * (8 * plan.block_kv + 32 * plan.kv_step)
    return plan.q_tile * (2 * plan.kv_tile + 13 * plan.kv_step)


def vmem_bytes(plan: BackwardPlan) -> int:
    """Returns the VMEM that this call needs."""
    return block_bytes(plan) + scratch_bytes(plan) + spill_bytes(plan)


def vmem_limit(plan: BackwardPlan) -> int:
    """Returns what the compiler may use: the limit given, else little more than the need."""
    if plan.blocks.vmem_limit_bytes:
        return plan.blocks.vmem_limit_bytes
    return min(int(vmem_bytes(plan) * MARGIN) + MIB, VMEM_BYTES[plan.options.chip])


def vmem_problems(plan: BackwardPlan) -> Sequence[Problem]:
    """Returns why this call does not fit, if it does not."""
    chip, given = plan.options.chip, plan.blocks.vmem_limit_bytes
    if chip not in VMEM_BYTES:
        known = ", ".join(VMEM_BYTES)
        rule, remedy = f"must be one of {known}", "Name the chip that the program is compiled for"
        return [Problem(name="chip", value=chip, rule=rule, remedy=remedy)]
    need, room = vmem_bytes(plan), min(given or VMEM_BYTES[chip], VMEM_BYTES[chip])
    if need <= room:
        return []
    queries = plan.group_blocks * plan.block_q
    return [
        Problem(
            name="flash_block_sizes",
            value=f"block_q_dkv={plan.block_q}, block_kv_dkv={plan.block_kv}, {queries} queries",
            rule=f"the backward pass needs {need / MIB:.1f} MiB of VMEM, more than the "
            f"{room / MIB:.1f} MiB it may use",
            remedy="Use a smaller block_kv_dkv or block_q_dkv",
        )
    ]


def fit_blocks(shape: FlashShape, blocks: BlockSizes) -> BlockSizes:
    """Returns the backward sizes, no longer than the sequences need; refuses broken ones.

    Blocks are about equal, and whole tiles.
    """
    blocks.check_backward()
    tile = min(blocks.block_kv_dkv_compute, round_up(shape.kv_len, LANES))
    q_tile = min(fitting(QUERIES_AT_ONCE, blocks.block_q_dkv), round_up(shape.q_len, LANES))
    return replace(
        blocks,
        block_q_dkv=_whole_tiles(blocks.block_q_dkv, shape.q_len, q_tile),
        block_kv_dkv=_whole_tiles(blocks.block_kv_dkv, shape.kv_len, tile),
        block_kv_dkv_compute=tile,
    )


def _whole_tiles(most: int, length: int, tile: int) -> int:
    return even_block(max(tile, most // tile * tile), length, tile)


def plan_backward(
    shape: FlashShape,
    blocks: BlockSizes,
    options: FlashOptions,
    *,
    masked: bool = False,
    lengths: bool = False,
    out_dtype: str = "float32",
) -> list[BackwardPlan]:
    """Returns the plans of the fewest calls that fit the VMEM, each for a run of the queries.

    `masked` and `lengths` say whether the calls have a key mask and key lengths; `block_q_dq`
    limits the queries of a call. Where the gradients of keys are to be added up over several calls,
    all are in float32. Raises `ProblemsFound` with every reason against it.
    """
    problems = [*shape_problems(shape, 1), *_lossy(options)]
    if problems:
        raise ProblemsFound(problems)
    blocks.check_backward()

    def of_queries(length: int) -> BackwardPlan:
        run = replace(shape, q_len=length)
        return BackwardPlan(
            shape=run,
            blocks=fit_blocks(run, blocks),
            options=options,
            masked=masked,
            lengths=lengths,
            out_dtype=out_dtype if length == shape.q_len else "float32",
        )

    least = of_queries(min(LANES, shape.q_len))
    if too_much := vmem_problems(least):
        raise ProblemsFound(too_much)
    size = min(shape.q_len, blocks.block_q_dq // shape.group or shape.q_len)
    while vmem_problems(of_queries(size)):
        size = shape.q_len // (-(-shape.q_len // size) + 1)
    calls = -(-shape.q_len // size)
    size = min(shape.q_len, round_up(-(-shape.q_len // calls), LANES))
    starts = range(0, shape.q_len, size)
    return [of_queries(min(size, shape.q_len - start)) for start in starts]


def _lossy(options: FlashOptions) -> list[Problem]:
    if options.product is not Product.FP8:
        return []
    return [
        Problem(
            name="product",
            value=options.product,
            rule="has no gradient: scores of rounded q and k are constant almost everywhere",
            remedy="Use Product.NATIVE, by a name without fp8",
        )
    ]

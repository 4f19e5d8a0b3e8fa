"""Gradient of flash attention on one device: dq, dk, dv by one `pallas_call`.

flash_gradients        from the output, its natural log-sum and the gradient of the output
reference_gradients    the same as dense arithmetic, in float32 or the type of its inputs

Keys may be some of all keys: with `out` and `log_sum` over all of them, the gradients of q add up
over shards of keys, and those of k and v are complete. Softmax does not depend on how its shift is
chosen, so online and fixed-m softmax have the same gradient; smoothed keys give the same dq, since
every row of dS adds up to zero.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Bool, Float, Int

from maxdiffusion.kernels.flash.api import attended_keys, mask_limits
from maxdiffusion.kernels.flash.backward_body import differentiate
from maxdiffusion.kernels.flash.backward_plan import (
    ROWS_PER_QUERY,
    BackwardPlan,
    plan_backward,
    vmem_limit,
)
from maxdiffusion.kernels.flash.config import FlashOptions, FlashShape, Scheduler
from maxdiffusion.kernels.tpu import LANES, BlockSizes

NO_KEYS = 1e30
"""Shift of a query that attends to no key: every power of a score less this is zero."""


class Gradients(NamedTuple):
    """Gradients of k and v, and the share of these keys in the gradient of q."""

    d_q: Float[Array, "B S N H"]
    d_k: Float[Array, "B T K H"]
    d_v: Float[Array, "B T K H"]


class BackwardInputs(NamedTuple):
    """Arrays of one call: prefetched scalars, then blocks in the plan's layout."""

    limits: Array
    full: Array | None
    qt: Array
    d_ot: Array
    per_query: Array
    k: Array
    v: Array
    mask: Array | None

    @property
    def scalars(self) -> list[Array]:
        """Returns what is prefetched into scalar memory."""
        return [x for x in self[:2] if x is not None]

    @property
    def blocks(self) -> list[Array]:
        """Returns what is fetched block by block."""
        return [x for x in self[2:] if x is not None]


def flash_gradients(
    qkv: tuple[Float[Array, "B S N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]],
    outcome: tuple[Float[Array, "B S N H"], Float[Array, "B S N"], Float[Array, "B S N H"]],
    *,
    blocks: BlockSizes,
    options: FlashOptions,
    kv_len: Int[Array, " B"] | None = None,
    kv_mask: Bool[Array, "B T"] | None = None,
    out_dtype: str = "float32",
) -> Gradients:
    """Returns the gradients of q, k and v over the keys before `kv_len` where `kv_mask` is True.

    `outcome` is the output over all keys, the natural log of its sum of exponentials (-inf without
    keys), and the gradient of the output. Sums are in float32, rounded once to `out_dtype`.
    """
    out, log_sum, d_out = outcome
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=3)
    return shard_gradients(
        qkv,
        (log_sum, delta, d_out),
        blocks=blocks,
        options=options,
        kv_len=kv_len,
        kv_mask=kv_mask,
        out_dtype=out_dtype,
    )


def shard_gradients(
    qkv: tuple[Float[Array, "B S N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]],
    outcome: tuple[Float[Array, "B S N"], Float[Array, "B S N"], Float[Array, "B S N H"]],
    *,
    blocks: BlockSizes,
    options: FlashOptions,
    kv_len: Int[Array, " B"] | None = None,
    kv_mask: Bool[Array, "B T"] | None = None,
    out_dtype: str = "float32",
) -> Gradients:
    """Returns `flash_gradients`, from sums that a caller with several shards of keys makes once.

    `outcome` is the natural log-sum over all keys, sum(out * d_out) over head features, and d_out.
    """
    q, k, v = qkv
    per_query = _per_query(*outcome[:2], options)
    d_out = outcome[2].astype(q.dtype)
    plans = plan_backward(
        FlashShape.of(q, k, v),
        blocks,
        options,
        masked=kv_mask is not None,
        lengths=kv_len is not None,
        out_dtype=out_dtype,
    )
    parts, start = [], 0
    for plan in plans:
        run = slice(start, start + plan.shape.q_len)
        queries = q[:, run], d_out[:, run], per_query[..., run]
        parts.append(_call(plan, queries, (k, v), kv_len, kv_mask))
        start = run.stop
    if len(parts) == 1:
        return parts[0]
    return Gradients(
        d_q=jnp.concatenate([part.d_q for part in parts], axis=1).astype(out_dtype),
        d_k=functools.reduce(jnp.add, [part.d_k for part in parts]).astype(out_dtype),
        d_v=functools.reduce(jnp.add, [part.d_v for part in parts]).astype(out_dtype),
    )


def _per_query(
    log_sum: Float[Array, "B S N"], delta: Float[Array, "B S N"], options: FlashOptions
) -> Float[Array, "B N _ S"]:
    """Returns shift (the log-sum in units of the exponent) and delta of every query."""
    shift = log_sum.astype(jnp.float32) * options.exponent.per_nat
    shift = jnp.where(jnp.isfinite(shift), shift, NO_KEYS)
    return jnp.stack([shift, delta], axis=1).transpose(0, 3, 1, 2)


def _call(
    plan: BackwardPlan,
    queries: tuple[Array, Array, Array],
    kv: tuple[Array, Array],
    kv_len: Array | None,
    kv_mask: Array | None,
) -> Gradients:
    """Returns the gradients of one call, from q, d_out and shift with delta of its queries."""
    inputs = backward_inputs(plan, queries, kv, kv_len, kv_mask)
    grads = pallas_call(plan, inputs)(*inputs.scalars, *inputs.blocks)
    return Gradients(*(_from_kernel(plan, x) for x in grads))


def backward_inputs(
    plan: BackwardPlan,
    queries: tuple[Float[Array, "B S N H"], Float[Array, "B S N H"], Float[Array, "B N _ S"]],
    kv: tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]],
    kv_len: Int[Array, " B"] | None,
    kv_mask: Bool[Array, "B T"] | None,
) -> BackwardInputs:
    """Returns the arrays of one kernel call in the plan's layout."""
    keys = plan.shape.kv_len
    mask = full = None
    if kv_mask is not None:
        attended = attended_keys(kv_len, kv_mask, keys)
        assert attended is not None
        limits, full = mask_limits(attended), _full_blocks(plan, attended)
        mask = attended.astype(jnp.int32)[:, None, :]
    elif kv_len is not None:
        limits = jnp.clip(kv_len, 0, keys).astype(jnp.int32)
    else:
        limits = jnp.full(plan.shape.batch, keys, jnp.int32)
    q, d_out, per_query = queries
    # Scaled in float32 and rounded once, as in the forward pass.
    scaled = (q.astype(jnp.float32) * plan.score_scale).astype(q.dtype)
    qt, d_ot = (x.transpose(0, 2, 3, 1) for x in (scaled, d_out))
    # Queries past the end are zeros; with zero shift and delta their gradients are zero too.
    spare = plan.q_blocks * plan.block_q - plan.shape.q_len
    widths = ((0, 0), (0, 0), (0, 0), (0, spare))
    qt, d_ot, per_query = (jnp.pad(x, widths) for x in (qt, d_ot, per_query))
    k, v = (_to_kernel(plan, x) for x in kv)
    return BackwardInputs(limits, full, qt, d_ot, per_query, k, v, mask)


def _full_blocks(plan: BackwardPlan, attended: Bool[Array, "B T"]) -> Int[Array, "B blocks"]:
    """Returns 1 for every block of keys that is attended to its last key."""
    spare = plan.kv_blocks * plan.block_kv - attended.shape[1]
    whole = jnp.pad(attended, ((0, 0), (0, spare)))
    return jnp.all(whole.reshape(-1, plan.kv_blocks, plan.block_kv), axis=2).astype(jnp.int32)


def _to_kernel(plan: BackwardPlan, x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1) if plan.folded else x.transpose(0, 2, 1, 3)


def _from_kernel(plan: BackwardPlan, x: Array) -> Array:
    if plan.folded:
        return x.reshape(*x.shape[:2], -1, plan.shape.head_dim)
    return x.transpose(0, 2, 1, 3)


def pallas_call(plan: BackwardPlan, inputs: BackwardInputs) -> Callable[..., Sequence[Array]]:
    """Returns the kernel of a plan: from scalars and blocks to [d_q, d_k, d_v]."""
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(inputs.scalars),
        grid=(plan.shape.batch, plan.shape.kv_heads, plan.kv_blocks, plan.group_blocks),
        in_specs=_in_specs(plan),
        out_specs=_out_specs(plan),
        scratch_shapes=_scratch(plan),
    )
    return pl.pallas_call(
        functools.partial(differentiate, plan),
        grid_spec=grid_spec,
        out_shape=_out_shapes(plan, inputs),
        compiler_params=_compiler_params(plan),
        cost_estimate=_cost(plan),
        interpret=plan.options.interpret,
        name=f"flash_backward_{plan.block_q}_{plan.block_kv}",
    )


def _block(plan: BackwardPlan, rows: int, index: Callable[..., tuple[Any, Any]]) -> pl.BlockSpec:
    """Returns the spec of `rows` rows of a head; `index` gives the block of rows and the head."""

    def folded(b: Array, n: Array, j: Array, i: Array, limits: Any, *_: Any) -> tuple[Any, ...]:
        block, head = index(b, n, j, i, limits)
        return b, block, head

    def by_head(b: Array, n: Array, j: Array, i: Array, limits: Any, *_: Any) -> tuple[Any, ...]:
        block, head = index(b, n, j, i, limits)
        return b, head, block, 0

    if plan.folded:
        return pl.BlockSpec((None, rows, plan.shape.head_dim), folded)
    return pl.BlockSpec((None, None, rows, plan.shape.head_dim), by_head)


def _queries(plan: BackwardPlan, n: Array, i: Array) -> tuple[Array, Array]:
    """Returns the block and the head of block `i` of the queries that share key head `n`."""
    return i % plan.q_blocks, n * plan.shape.group + i // plan.q_blocks


def _attended_block(plan: BackwardPlan, b: Array, j: Array, limits: Any) -> Array:
    """Returns the block of keys to have in VMEM: past the last attended key it stays the same."""
    return jnp.minimum(j, jnp.maximum(limits[b] - 1, 0) // plan.block_kv)


def _in_specs(plan: BackwardPlan) -> list[pl.BlockSpec]:
    keys = _block(
        plan, plan.block_kv, lambda b, n, j, i, limits: (_attended_block(plan, b, j, limits), n)
    )

    def per_query(b: Array, n: Array, j: Array, i: Array, *_: Any) -> tuple[Any, ...]:
        block, head = _queries(plan, n, i)
        return b, head, 0, block

    def mask(b: Array, n: Array, j: Array, i: Array, limits: Any, *_: Any) -> tuple[Any, ...]:
        return b, 0, _attended_block(plan, b, j, limits)

    rows = [
        pl.BlockSpec((None, None, height, plan.block_q), per_query)
        for height in (plan.shape.head_dim, plan.shape.head_dim, ROWS_PER_QUERY)
    ]
    masks = [pl.BlockSpec((None, 1, plan.block_kv), mask)] if plan.masked else []
    return [*rows, keys, keys, *masks]


def _out_specs(plan: BackwardPlan) -> list[pl.BlockSpec]:
    def queries(b: Array, n: Array, j: Array, i: Array, _: Any) -> tuple[Any, Any]:
        # The sums are complete at the last block of keys; before it nothing is written.
        return _queries(plan, n, jnp.where(j == plan.kv_blocks - 1, i, 0))

    keys = _block(plan, plan.block_kv, lambda b, n, j, i, _: (j, n))
    return [_block(plan, plan.block_q, queries), keys, keys]


def _out_shapes(plan: BackwardPlan, inputs: BackwardInputs) -> list[jax.ShapeDtypeStruct]:
    # Under shard_map every gradient varies over the mesh axes that the queries vary over.
    varies = jax.typeof(inputs.qt).manual_axis_type
    dtype, shape = jnp.dtype(plan.out_dtype), plan.shape
    queries: tuple[int, ...] = (shape.batch, shape.heads, shape.q_len, shape.head_dim)
    if plan.folded:
        queries = (shape.batch, shape.q_len, shape.heads * shape.head_dim)
    shapes = (queries, inputs.k.shape, inputs.v.shape)
    return [jax.ShapeDtypeStruct(x, dtype, manual_axis_type=varies) for x in shapes]


def _scratch(plan: BackwardPlan) -> list[Any]:
    width, block_kv = plan.shape.head_dim, plan.block_kv
    scratch = [
        pltpu.VMEM((plan.group_blocks, width, plan.block_q), jnp.float32),
        pltpu.VMEM((width, block_kv), jnp.float32),
        pltpu.VMEM((width, block_kv), jnp.float32),
        pltpu.VMEM((width, block_kv), plan.dtype),
    ]
    if plan.partial_keys:
        scratch += [pltpu.VMEM((block_kv, width), plan.dtype)] * 2
        scratch += [pltpu.VMEM((block_kv, LANES), jnp.float32)]
    return scratch


def _compiler_params(plan: BackwardPlan) -> pltpu.CompilerParams:
    linear = plan.options.scheduler is Scheduler.LINEAR_PROGRAM
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        vmem_limit_bytes=vmem_limit(plan),
        flags={"XLA_TPU_FORCE_LP_LLO_SCHEDULER": True} if linear else None,
    )


def _cost(plan: BackwardPlan) -> pl.CostEstimate:
    shape = plan.shape
    pairs = shape.batch * shape.heads * shape.q_len * shape.kv_len
    queries = shape.batch * shape.heads * shape.q_len * shape.head_dim
    keys = shape.batch * shape.kv_heads * shape.kv_len * shape.head_dim
    out = jnp.dtype(plan.out_dtype).itemsize
    moved = 2 * queries * plan.kv_blocks * shape.itemsize + queries * out
    return pl.CostEstimate(
        flops=10 * pairs * shape.head_dim,
        transcendentals=pairs,
        bytes_accessed=moved + 2 * keys * (shape.itemsize + out),
    )


def reference_gradients(
    qkv: tuple[Float[Array, "B S N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]],
    outcome: tuple[Float[Array, "B S N H"], Float[Array, "B S N"], Float[Array, "B S N H"]],
    *,
    kv_len: Int[Array, " B"] | None = None,
    kv_mask: Bool[Array, "B T"] | None = None,
) -> Gradients:
    """Returns what `flash_gradients` does, as dense arithmetic in float32."""
    q, k, v, out, log_sum, d_out = (x.astype(jnp.float32) for x in (*qkv, *outcome))
    shape, exact = k.shape, lax.Precision.HIGHEST
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scale = q.shape[3] ** -0.5
    dot = functools.partial(jnp.einsum, precision=exact)
    shift = jnp.where(jnp.isfinite(log_sum), log_sum, NO_KEYS)
    p = jnp.exp(jnp.minimum(dot("BSNH,BTNH->BSNT", q * scale, k) - shift[..., None], 0.0))
    attended = attended_keys(kv_len, kv_mask, k.shape[1])
    if attended is not None:
        p = jnp.where(attended[:, None, None], p, 0.0)
        k, v = (jnp.where(attended[:, :, None, None], x, 0.0) for x in (k, v))
    delta = jnp.sum(out * d_out, axis=3)
    d_s = p * (dot("BSNH,BTNH->BSNT", d_out, v) - delta[..., None]) * scale
    d_k, d_v = dot("BSNT,BSNH->BTNH", d_s, q), dot("BSNT,BSNH->BTNH", p, d_out)
    d_k, d_v = (x.reshape(*shape[:3], group, shape[3]).sum(axis=3) for x in (d_k, d_v))
    return Gradients(d_q=dot("BSNT,BTNH->BSNH", d_s, k), d_k=d_k, d_v=d_v)

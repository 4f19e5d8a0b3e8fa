"""Flash attention on one device: [B, S, N, H] in and out, by one `pallas_call`.

flash_attention             attention over all keys, or from the partials of earlier ones
flash_attention_partials    unnormalised attention over some of the keys
reference_attention, reference_partials    the same as dense float32 arithmetic
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Bool, Float, Int, Int32

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.kernels.flash.body import attend
from maxdiffusion.kernels.flash.config import (
    NO_SCORE,
    Exponent,
    FixedM,
    FlashOptions,
    FlashShape,
    Online,
    Product,
    Scheduler,
)
from maxdiffusion.kernels.flash.fixed_m import FixedMBounds, fixed_m_bounds, smooth_keys
from maxdiffusion.kernels.flash.fp8 import fp8_keys
from maxdiffusion.kernels.flash.plan import KernelPlan
from maxdiffusion.kernels.flash.vmem import plan_kernel, vmem_limit
from maxdiffusion.kernels.reference import Partials
from maxdiffusion.kernels.tpu import SUBLANES, BlockSizes


class KernelInputs(NamedTuple):
    """Arrays of one call: prefetched scalars, then q, k, v in the plan's layout, then the mask."""

    limits: Array
    full: Array | None
    key_norm: Array | None
    fixed: Array | None
    key_scale: Array | None
    q: Array
    k: Array
    v: Array
    mask: Array | None
    before: tuple[Array, Array, Array] | None = None

    @property
    def scalars(self) -> list[Array]:
        """Returns what is prefetched into scalar memory."""
        return [x for x in self[:5] if x is not None]

    @property
    def blocks(self) -> list[Array]:
        """Returns what is fetched block by block."""
        return [*(x for x in self[5:9] if x is not None), *(self.before or ())]


def pallas_call(plan: KernelPlan, inputs: KernelInputs) -> Callable[..., Sequence[Array]]:
    """Returns the kernel of a plan: from scalars and blocks to its results.

    They are [out], [out, log_sum], or [o, m, l] for partials.
    """
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(inputs.scalars),
        grid=_grid(plan),
        in_specs=_in_specs(plan),
        out_specs=_out_specs(plan),
        scratch_shapes=_scratch(plan),
    )
    return pl.pallas_call(
        functools.partial(attend, plan),
        grid_spec=grid_spec,
        out_shape=_out_shapes(plan, inputs),
        compiler_params=_compiler_params(plan),
        cost_estimate=_cost(plan),
        interpret=plan.options.interpret,
        name=_name(plan),
        input_output_aliases=_aliases(plan, inputs),
    )


def _grid(plan: KernelPlan) -> tuple[int, ...]:
    tiles = plan.shape.heads // plan.blocks.heads_per_tile
    return plan.shape.batch, tiles, plan.q_blocks, plan.kv_blocks


def _q_spec(plan: KernelPlan) -> pl.BlockSpec:
    heads, rows, width = plan.blocks.heads_per_tile, plan.blocks.block_q, plan.shape.head_dim
    if plan.folded:
        return pl.BlockSpec((None, rows, heads * width), lambda b, n, i, j, *_: (b, i, n))
    return pl.BlockSpec((None, heads, rows, width), lambda b, n, i, j, *_: (b, n, i, 0))


def _kv_index(plan: KernelPlan, b: Array, n: Array, j: Array, limits: Any) -> tuple[Array, Array]:
    """Returns the key head tile and the block of keys to have in VMEM at a step.

    Past the last attended key the block stays what it was, so nothing more is fetched.
    """
    per_tile, size = plan.blocks.heads_per_tile, plan.blocks.block_kv
    tile = (n * per_tile // plan.shape.group) // plan.kv_heads_per_tile
    last = jnp.maximum(limits[b] - 1, 0) // size
    return tile, jnp.minimum(j, last)


def _kv_spec(plan: KernelPlan, rows: int, width: int) -> pl.BlockSpec:
    heads = plan.kv_heads_per_tile

    def folded(b: Array, n: Array, i: Array, j: Array, limits: Any, *_: Any) -> tuple[Any, ...]:
        tile, block = _kv_index(plan, b, n, j, limits)
        return b, block, tile

    def by_head(b: Array, n: Array, i: Array, j: Array, limits: Any, *_: Any) -> tuple[Any, ...]:
        tile, block = _kv_index(plan, b, n, j, limits)
        return b, tile, block, 0

    if plan.folded:
        return pl.BlockSpec((None, rows, heads * width), folded)
    return pl.BlockSpec((None, heads, rows, width), by_head)


def _in_specs(plan: KernelPlan) -> list[pl.BlockSpec]:
    rows = plan.blocks.block_kv
    keys = _kv_spec(plan, rows // plan.keys_per_row, plan.product_depth)
    specs = [_q_spec(plan), keys, _kv_spec(plan, rows, plan.shape.head_dim)]
    if plan.masked:

        def mask_index(
            b: Array, n: Array, i: Array, j: Array, limits: Any, *_: Any
        ) -> tuple[Any, ...]:
            return b, 0, _kv_index(plan, b, n, j, limits)[1]

        specs.append(pl.BlockSpec((None, 1, plan.blocks.block_kv), mask_index))
    return specs + (_sums_specs(plan) if plan.carried else [])


def _out_specs(plan: KernelPlan) -> list[pl.BlockSpec]:
    sums = _sums_specs(plan)
    if plan.partials:
        return sums
    return [_q_spec(plan), sums[-1]] if plan.log_sum else [_q_spec(plan)]


def _sums_specs(plan: KernelPlan) -> list[pl.BlockSpec]:
    """Returns the blocks of o, m and l, which calls pass on to each other as they keep them."""
    heads, queries = plan.blocks.heads_per_tile, plan.blocks.block_q
    return [
        pl.BlockSpec((None, heads, rows, queries), lambda b, n, i, j, *_: (b, n, 0, i))
        for rows in (plan.shape.head_dim, 1, 1)
    ]


def _aliases(plan: KernelPlan, inputs: KernelInputs) -> dict[int, int]:
    """Partials that go in and come out share their memory: a block is read before it is written."""
    if not (plan.carried and plan.partials):
        return {}
    first = len(inputs.scalars) + len(inputs.blocks) - 3
    return {first + index: index for index in range(3)}


def _out_shapes(plan: KernelPlan, inputs: KernelInputs) -> list[jax.ShapeDtypeStruct]:
    # Under shard_map the result varies over the mesh axes that the queries vary over.
    varies = jax.typeof(inputs.q).manual_axis_type
    shape = plan.shape
    o, total = (
        jax.ShapeDtypeStruct(
            (shape.batch, shape.heads, rows, shape.q_len), jnp.float32, manual_axis_type=varies
        )
        for rows in (shape.head_dim, 1)
    )
    if plan.partials:
        return [o, total, total]
    out = jax.ShapeDtypeStruct(inputs.q.shape, plan.dtype, manual_axis_type=varies)
    return [out, total] if plan.log_sum else [out]


def _scratch(plan: KernelPlan) -> list[Any]:
    heads, width, rows = plan.blocks.heads_per_tile, plan.shape.head_dim, plan.blocks.block_q
    per_query = [pltpu.VMEM((heads, r, rows), jnp.float32) for r in (width, SUBLANES, 1)]
    queries = [pltpu.VMEM((heads, plan.product_depth, rows), plan.product_dtype)]
    queries += [per_query[-1]] * plan.fp8
    tile = (plan.blocks.block_kv, plan.blocks.q_tile)
    weights = [pltpu.VMEM(tile, plan.dtype)] * plan.shift_in_product
    return [*queries, *per_query, per_query[-1], *per_query, *weights]


def _compiler_params(plan: KernelPlan) -> pltpu.CompilerParams:
    linear = plan.options.scheduler is Scheduler.LINEAR_PROGRAM
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=vmem_limit(plan),
        flags={"XLA_TPU_FORCE_LP_LLO_SCHEDULER": True} if linear else None,
    )


def _cost(plan: KernelPlan) -> pl.CostEstimate:
    shape = plan.shape
    pairs = shape.batch * shape.heads * shape.q_len * shape.kv_len
    queries = shape.batch * shape.heads * shape.q_len * shape.head_dim
    keys = shape.batch * shape.kv_heads * shape.kv_len * shape.head_dim * plan.q_blocks
    return pl.CostEstimate(
        flops=4 * pairs * shape.head_dim,
        transcendentals=pairs,
        bytes_accessed=2 * (queries + keys) * shape.itemsize,
    )


def _name(plan: KernelPlan) -> str:
    kind = "fixed_m" if plan.fixed_m else "online"
    kind += "_fp8" if plan.fp8 else ""
    blocks = f"{plan.blocks.block_q}_{plan.blocks.block_kv}"
    ends = ("_partials" if plan.partials else "") + ("_carried" if plan.carried else "")
    ends += "_log_sum" if plan.log_sum else ""
    return f"flash_{kind}_{blocks}{ends}"


def attended_keys(
    kv_len: Int[Array, " B"] | None, kv_mask: Bool[Array, "B T"] | None, keys: int
) -> Bool[Array, "B T"] | None:
    """Returns which keys are attended; None when all are."""
    if kv_len is None:
        return kv_mask
    before = jnp.arange(keys)[None, :] < kv_len[:, None]
    return before if kv_mask is None else before & kv_mask


def kernel_inputs(
    plan: KernelPlan,
    qkv: tuple[Float[Array, "B S N H"], Array, Float[Array, "B T K H"]],
    kv_len: Int[Array, " B"] | None,
    kv_mask: Bool[Array, "B T"] | None,
    bounds: FixedMBounds | None,
    before: Partials | None = None,
    key_scale: Float[Array, "B K"] | None = None,
) -> KernelInputs:
    """Returns the arrays of one kernel call in the plan's layout."""
    batch, keys = plan.shape.batch, plan.shape.kv_len
    mask = full = None
    if kv_mask is not None:
        attended = kv_mask
        if kv_len is not None:
            attended = attended & (jnp.arange(keys)[None, :] < kv_len[:, None])
        limits, full = mask_limits(attended), _full_blocks(plan, attended)
        mask = attended.astype(jnp.int32)[:, None, :]
    elif kv_len is not None:
        limits = jnp.clip(kv_len, 0, keys).astype(jnp.int32)
    else:
        limits = jnp.full(batch, keys, jnp.int32)
    q, k, v = (to_kernel(plan, x) for x in qkv)
    key_norm = None if bounds is None else bounds.key_norm.astype(jnp.float32)
    fixed = None if bounds is None else bounds.fixed.astype(jnp.int32)
    sums = None
    if before is not None:
        m, l = (x.transpose(0, 2, 1)[:, :, None] for x in (before.m, before.l))  # noqa: E741
        sums = (before.o.transpose(0, 2, 3, 1), m, l)
    return KernelInputs(limits, full, key_norm, fixed, key_scale, q, k, v, mask, sums)


def mask_limits(attended: Bool[Array, "B T"]) -> Int[Array, " B"]:
    """Returns one past the last attended key."""
    past = jnp.arange(1, attended.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(attended, past[None, :], 0), axis=1)


def _full_blocks(plan: KernelPlan, attended: Bool[Array, "B T"]) -> Int[Array, "B blocks"]:
    """Returns 1 for every block of keys that is attended to its last key."""
    size = plan.blocks.block_kv
    spare = plan.kv_blocks * size - attended.shape[1]
    whole = jnp.pad(attended, ((0, 0), (0, spare)))
    return jnp.all(whole.reshape(-1, plan.kv_blocks, size), axis=2).astype(jnp.int32)


def to_kernel(plan: KernelPlan, x: Array) -> Array:
    """Returns x in the plan's layout."""
    if plan.folded:
        return x.reshape(*x.shape[:2], -1)
    return x.transpose(0, 2, 1, 3)


def from_kernel(plan: KernelPlan, x: Array) -> Float[Array, "B S N H"]:
    """Returns [B, S, N, H] from the plan's layout."""
    if plan.folded:
        return x.reshape(*x.shape[:2], -1, plan.shape.head_dim)
    return x.transpose(0, 2, 1, 3)


def reference_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    kv_len: Int[Array, " B"] | None = None,
    kv_mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B S N H"]:
    """Returns softmax(q k^T / sqrt(H)) v in q's dtype, zeros for queries without keys."""
    o, _, l = reference_partials(q, k, v, kv_len=kv_len, kv_mask=kv_mask)  # noqa: E741
    return (o * jnp.where(l > 0, 1.0 / l, 0.0)[..., None]).astype(q.dtype)


def reference_partials(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    exponent: Exponent = Exponent.BASE_2,
    kv_len: Int[Array, " B"] | None = None,
    kv_mask: Bool[Array, "B T"] | None = None,
) -> Partials:
    """Returns the unnormalised output, the largest score of every query and the sum of powers."""
    group, exact = q.shape[2] // k.shape[2], lax.Precision.HIGHEST
    k, v = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (k, v))
    scaled = q.astype(jnp.float32) * (exponent.per_nat * q.shape[3] ** -0.5)
    scores = jnp.einsum("BSNH,BTNH->BSNT", scaled, k, precision=exact)
    attended = attended_keys(kv_len, kv_mask, k.shape[1])
    if attended is not None:
        scores = jnp.where(attended[:, None, None], scores, -jnp.inf)
        v = jnp.where(attended[:, :, None, None], v, 0.0)
    m = jnp.maximum(jnp.max(scores, axis=3), NO_SCORE)
    p = exponent.power(scores - m[..., None])
    return Partials(
        o=jnp.einsum("BSNT,BTNH->BSNH", p, v, precision=exact), m=m, l=jnp.sum(p, axis=3)
    )


def flash_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"] | Int32[Array, "B _T K _H"],
    v: Float[Array, "B T K H"],
    *,
    blocks: BlockSizes,
    options: FlashOptions,
    kv_len: Int[Array, " B"] | None = None,
    kv_mask: Bool[Array, "B T"] | None = None,
    bounds: FixedMBounds | None = None,
    before: Partials | None = None,
    key_scale: Float[Array, "B K"] | None = None,
) -> Float[Array, "B S N H"]:
    """Returns softmax(q k^T / sqrt(H)) v over the keys before `kv_len` where `kv_mask` is True.

    A query without any key gets zeros. With fixed-m softmax and no `bounds`, the keys are smoothed
    and the bounds measured here; given `bounds` describe `k` as it is. `before` are partials over
    other keys, which count as well; with fixed-m softmax they come with the bounds they were made
    with. In float8 the keys are smoothed and split here, unless `key_scale` is given: then `k` is
    their packed split.
    """
    given = (kv_len, kv_mask, bounds, before, key_scale)
    plan, inputs = _prepared((q, k, v), given, blocks=blocks, options=options, log_sum=False)
    (out,) = pallas_call(plan, inputs)(*inputs.scalars, *inputs.blocks)
    return from_kernel(plan, out)


def flash_attention_with_log_sum(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    blocks: BlockSizes,
    options: FlashOptions,
    kv_len: Int[Array, " B"] | None = None,
    kv_mask: Bool[Array, "B T"] | None = None,
    bounds: FixedMBounds | None = None,
    before: Partials | None = None,
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N"]]:
    """Returns `flash_attention`, and the natural log of the sum of exponentials of every query.

    Both are what the backward pass needs. With fixed-m softmax and no `bounds` the keys are
    smoothed here, and the log-sum is that of smoothed keys. Without keys it is -inf.
    """
    given = (kv_len, kv_mask, bounds, before, None)
    plan, inputs = _prepared((q, k, v), given, blocks=blocks, options=options, log_sum=True)
    out, log_sum = pallas_call(plan, inputs)(*inputs.scalars, *inputs.blocks)
    return from_kernel(plan, out), log_sum[:, :, 0].transpose(0, 2, 1)


def _prepared(
    qkv: tuple[Array, Array, Array],
    given: tuple[Any, Any, FixedMBounds | None, Partials | None, Any],
    *,
    blocks: BlockSizes,
    options: FlashOptions,
    log_sum: bool,
) -> tuple[KernelPlan, KernelInputs]:
    """Returns the plan and the arrays of a call over all keys, or the last of them."""
    q, k, v = qkv
    kv_len, kv_mask, bounds, before, key_scale = given
    _refuse_stray_bounds(options, bounds)
    if before is not None:
        _refuse_missing_bounds(options, bounds)
        _refuse_missing_scale(options, key_scale)
    selection = {"masked": kv_mask is not None, "lengths": kv_len is not None}
    selection |= {"carried": before is not None, "log_sum": log_sum}
    shape = FlashShape.of(q, v if options.product is Product.FP8 else k, v)
    plan = plan_kernel(shape, blocks, options, **selection)
    if isinstance(options.softmax, FixedM) and bounds is None:
        attended = attended_keys(kv_len, kv_mask, k.shape[1])
        k = smooth_keys(k, attended)
        bounds = fixed_m_bounds(
            q, k, v, attended, gate=options.softmax.gate, exponent=options.exponent
        )
    if plan.fp8 and key_scale is None:
        attended = attended_keys(kv_len, kv_mask, k.shape[1])
        k, key_scale = fp8_keys(k, attended, interpret=options.interpret)
    return plan, kernel_inputs(plan, (q, k, v), kv_len, kv_mask, bounds, before, key_scale)


def flash_attention_partials(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"] | Int32[Array, "B _T K _H"],
    v: Float[Array, "B T K H"],
    *,
    blocks: BlockSizes,
    options: FlashOptions,
    kv_len: Int[Array, " B"] | None = None,
    kv_mask: Bool[Array, "B T"] | None = None,
    bounds: FixedMBounds | None = None,
    before: Partials | None = None,
    key_scale: Float[Array, "B K"] | None = None,
) -> Partials:
    """Returns the unnormalised float32 output and its shift and sum, for merging.

    With fixed-m softmax `bounds` must be given, and be the same for every call that is merged.
    In float8 `k` is the packed split and `key_scale` that of all calls. Partials `before`, over
    other keys, are merged, and their memory is used again.
    """
    _refuse_stray_bounds(options, bounds)
    _refuse_missing_bounds(options, bounds)
    _refuse_missing_scale(options, key_scale)
    selection = {"masked": kv_mask is not None, "lengths": kv_len is not None}
    selection["carried"] = before is not None
    shape = FlashShape.of(q, v if options.product is Product.FP8 else k, v)
    plan = plan_kernel(shape, blocks, options, **selection, partials=True)
    inputs = kernel_inputs(plan, (q, k, v), kv_len, kv_mask, bounds, before, key_scale)
    o, m, l = pallas_call(plan, inputs)(*inputs.scalars, *inputs.blocks)  # noqa: E741
    m, l = (x[:, :, 0].transpose(0, 2, 1) for x in (m, l))  # noqa: E741
    return Partials(o=o.transpose(0, 3, 1, 2), m=m, l=l)


def _refuse_stray_bounds(options: FlashOptions, bounds: FixedMBounds | None) -> None:
    if bounds is not None and isinstance(options.softmax, Online):
        problem = Problem(
            name="bounds",
            value="given",
            rule="belong to fixed-m softmax, and the options say online",
            remedy="Use FlashOptions(softmax=FixedM()) or give no bounds",
        )
        raise ProblemsFound([problem])


def _refuse_missing_bounds(options: FlashOptions, bounds: FixedMBounds | None) -> None:
    if bounds is None and isinstance(options.softmax, FixedM):
        problem = Problem(
            name="bounds",
            value=None,
            rule="must be given for fixed-m partials: all calls that are merged share them",
            remedy="Take them from fixed_m_bounds, or from key_norms and gate_heads on a ring",
        )
        raise ProblemsFound([problem])


def _refuse_missing_scale(options: FlashOptions, key_scale: Array | None) -> None:
    if key_scale is None and options.product is Product.FP8:
        problem = Problem(
            name="key_scale",
            value=None,
            rule="must be given for partials in float8: all calls that are merged share it",
            remedy="Take keys and scale from split_keys",
        )
        raise ProblemsFound([problem])

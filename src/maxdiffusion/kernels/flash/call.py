"""The pallas_call of the flash kernel: grid, blocks, scratch, compiler parameters."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxdiffusion.kernels.flash.body import attend
from maxdiffusion.kernels.flash.options import Scheduler
from maxdiffusion.kernels.flash.plan import KernelPlan
from maxdiffusion.kernels.flash.step import SUBLANES, Refs, State, Sums
from maxdiffusion.kernels.flash.vmem import vmem_limit


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


def run(plan: KernelPlan, inputs: KernelInputs) -> list[Array]:
    """Returns [out], or [o, m, l] when the plan asks for partials, in the plan's layout."""
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(inputs.scalars),
        grid=_grid(plan),
        in_specs=_in_specs(plan),
        out_specs=_out_specs(plan),
        scratch_shapes=_scratch(plan),
    )
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        grid_spec=grid_spec,
        out_shape=_out_shapes(plan, inputs),
        compiler_params=_compiler_params(plan),
        cost_estimate=_cost(plan),
        interpret=plan.options.interpret,
        name=_name(plan),
        input_output_aliases=_aliases(plan, inputs),
    )(*inputs.scalars, *inputs.blocks)


def _kernel(plan: KernelPlan, *refs: Any) -> None:
    """Names the references, whose number depends on the plan, and runs one grid step."""
    left = iter(refs)
    attend(
        plan,
        Refs(
            limits=next(left),
            full=next(left) if plan.masked else None,
            key_norm=next(left) if plan.fixed_m else None,
            fixed=next(left) if plan.fixed_m else None,
            key_scale=next(left) if plan.fp8 else None,
            q=next(left),
            k=next(left),
            v=next(left),
            mask=next(left) if plan.masked else None,
            before=Sums(o=next(left), m=next(left), l=next(left)) if plan.carried else None,
            out=next(left),
            out_m=next(left) if plan.partials else None,
            out_l=next(left) if plan.partials else None,
            qt=next(left),
            q_scale=next(left) if plan.fp8 else None,
            state=State(o=next(left), l=next(left), used=next(left), top=next(left)),
            saved=State(o=next(left), l=next(left), used=next(left), top=None),
        ),
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

    def folded(b: Array, n: Array, i: Array, j: Array, limits: Any, *_: Any) -> tuple:
        tile, block = _kv_index(plan, b, n, j, limits)
        return b, block, tile

    def by_head(b: Array, n: Array, i: Array, j: Array, limits: Any, *_: Any) -> tuple:
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

        def mask_index(b: Array, n: Array, i: Array, j: Array, limits: Any, *_: Any) -> tuple:
            return b, 0, _kv_index(plan, b, n, j, limits)[1]

        specs.append(pl.BlockSpec((None, 1, plan.blocks.block_kv), mask_index))
    return specs + (_sums_specs(plan) if plan.carried else [])


def _out_specs(plan: KernelPlan) -> list[pl.BlockSpec]:
    return _sums_specs(plan) if plan.partials else [_q_spec(plan)]


def _sums_specs(plan: KernelPlan) -> list[pl.BlockSpec]:
    block = (None, plan.blocks.heads_per_tile, 1, plan.blocks.block_q)
    per_query = pl.BlockSpec(block, lambda b, n, i, j, *_: (b, n, 0, i))
    return [_q_spec(plan), per_query, per_query]


def _aliases(plan: KernelPlan, inputs: KernelInputs) -> dict[int, int]:
    """Partials that go in and come out share their memory: a block is read before it is written."""
    if not (plan.carried and plan.partials):
        return {}
    first = len(inputs.scalars) + len(inputs.blocks) - 3
    return {first + index: index for index in range(3)}


def _out_shapes(plan: KernelPlan, inputs: KernelInputs) -> list[jax.ShapeDtypeStruct]:
    # Under shard_map the result varies over the mesh axes that the queries vary over.
    varies = jax.typeof(inputs.q).manual_axis_type
    dtype = jnp.float32 if plan.partials else plan.dtype
    shapes = [jax.ShapeDtypeStruct(inputs.q.shape, dtype, manual_axis_type=varies)]
    if plan.partials:
        per_query = (plan.shape.batch, plan.shape.heads, 1, plan.shape.q_len)
        shapes += [jax.ShapeDtypeStruct(per_query, jnp.float32, manual_axis_type=varies)] * 2
    return shapes


def _scratch(plan: KernelPlan) -> list[Any]:
    heads, width, rows = plan.blocks.heads_per_tile, plan.shape.head_dim, plan.blocks.block_q
    per_query = [pltpu.VMEM((heads, r, rows), jnp.float32) for r in (width, SUBLANES, 1)]
    queries = [pltpu.VMEM((heads, plan.product_depth, rows), plan.product_dtype)]
    queries += [per_query[-1]] * plan.fp8
    return [*queries, *per_query, per_query[-1], *per_query]


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
    return f"flash_{kind}_{blocks}{ends}"

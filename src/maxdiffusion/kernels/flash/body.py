"""The flash attention kernel as one grid step (batch, head tile, block of queries, block of keys).

Scores are transposed, S^T = K Q^T of [keys, queries]: maxima and sums then run over sublanes, what
a query carries (maximum, sum) is a row of lanes, and O^T = V^T P^T fills the MXU although a head is
only 128 wide. Blocks of keys that are wholly attended, and a last one that ends with the array,
go through `quick`; those cut by a mask or a length, and those whose maximum rises past the
headroom, go through `careful`.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from maxdiffusion.kernels.flash.blocks import LANES
from maxdiffusion.kernels.flash.careful import careful
from maxdiffusion.kernels.flash.fixed_m import CEILING_BITS
from maxdiffusion.kernels.flash.fp8 import fp8_queries
from maxdiffusion.kernels.flash.plan import KernelPlan
from maxdiffusion.kernels.flash.quick import quick, rose_too_far, take_back
from maxdiffusion.kernels.flash.step import NO_SCORE, Maximum, Refs, Step


def attend(plan: KernelPlan, refs: Refs) -> None:
    """Runs one grid step."""
    step = Step(plan, refs)

    @pl.when(step.kv_block == 0)
    def _() -> None:
        for head in step.heads:
            _start_queries(step, head)
            _start_state(step, head)

    if plan.fixed_m:
        for head in step.heads:
            _take_in_gated(step, head)
    else:
        _take_in(step, step.heads)

    @pl.when(step.kv_block == plan.kv_blocks - 1)
    def _() -> None:
        for head in step.heads:
            _finish(step, head)


def _start_queries(step: Step, head: int) -> None:
    """Scales the queries in float32, rounds them once and transposes them.

    For bfloat16 the rounding moves a score by at most 2**-9 sum_h |q_h k_h| / sqrt(H), no more than
    the rounding of q itself did; for float32 by 2**-24 of the same.
    """
    plan = step.plan
    q = step.of_head(step.refs.q, head)[...].astype(jnp.float32)
    if plan.shape.q_len % plan.blocks.block_q:
        # The last block ends past the array; what lies there is arbitrary bits.
        row = step.q_block * plan.blocks.block_q + lax.broadcasted_iota(jnp.int32, (len(q), 1), 0)
        q = jnp.where(row < plan.shape.q_len, q, 0.0)
    qt = (q * plan.score_scale).T
    if plan.fp8:
        step.refs.qt[head], scale = fp8_queries(qt)
        step.refs.q_scale[head] = scale * step.key_scale(head)
    else:
        step.refs.qt[head] = qt.astype(plan.dtype)


def _start_state(step: Step, head: int) -> None:
    """Begins with nothing, or with the sums over the keys of earlier calls."""
    state, reference = step.refs.state, _sample(step, head)
    if step.plan.carried:
        used = _carry_on(step, head)
        reference = jnp.maximum(reference, used)
    else:
        state.o[head] = jnp.zeros(state.o.shape[1:], jnp.float32)
        state.l[head] = jnp.zeros(state.l.shape[1:], jnp.float32)
        used = reference
    if step.plan.fixed_m:
        fixed, pinned = step.is_fixed(head), _pinned(step, head)
        used, reference = (jnp.where(fixed, pinned, x) for x in (used, reference))
    state.used[head] = used
    state.top[head] = reference


def _carry_on(step: Step, head: int) -> Array:
    """Takes over o and l of earlier keys; returns the reference that they are relative to."""
    plan, state, before = step.plan, step.refs.state, step.refs.before
    assert before is not None
    o, m, l = step.of_head(before.o, head)[...].T, before.m[head], before.l[head]  # noqa: E741
    if plan.shape.q_len % plan.blocks.block_q:
        # Past the array lie arbitrary bits, which must not reach the maximum over all queries.
        place = lax.broadcasted_iota(jnp.int32, m.shape, 1)
        there = step.q_block * plan.blocks.block_q + place < plan.shape.q_len
        o, m, l = (jnp.where(there, x, 0.0) for x in (o, m, l))  # noqa: E741
    row = lax.broadcasted_iota(jnp.int32, state.l.shape[1:], 0)
    state.o[head] = o
    state.l[head] = jnp.where(row == 0, l, 0.0)
    return m


def _sample(step: Step, head: int) -> Array:
    """Returns the largest score among the first 128 keys: a reference for the first block."""
    s = step.scores(head, pl.ds(0, LANES), slice(None))
    s = jnp.where(step.attended(0, LANES), s, NO_SCORE)
    return jnp.max(s, axis=0, keepdims=True)


def _pinned(step: Step, head: int) -> Array:
    """Returns ||q_i|| max_j ||k_j|| - C, the fixed reference of every query."""
    qt = step.refs.qt[head].astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(qt * qt, axis=0, keepdims=True))
    return norm * step.key_norm(head) - CEILING_BITS * step.plan.options.exponent.per_bit


def _take_in_gated(step: Step, head: int) -> None:
    """Adds this step's keys against the fixed bound where the gate allows it, else as online."""
    fixed = step.is_fixed(head)

    @pl.when(fixed)
    def _() -> None:
        _quickly(step, [head], Maximum.PINNED)
        if step.plan.selective:
            pl.when(_odd(step))(lambda: careful(step, [head], Maximum.PINNED))

    @pl.when(~fixed)
    def _() -> None:
        _take_in(step, [head])


def _take_in(step: Step, heads: Sequence[int]) -> None:
    """Adds this step's keys to the state, quickly if that is exact and carefully if not."""
    _quickly(step, heads, Maximum.RUNNING)
    again = rose_too_far(step, heads)
    odd = jnp.bool_(False)
    if step.plan.selective:
        odd = _odd(step)
        again = again & step.live() & ~odd
    pl.when(again)(lambda: take_back(step, heads))
    pl.when(again | odd)(lambda: careful(step, heads, Maximum.RUNNING))


def _quickly(step: Step, heads: Sequence[int], maximum: Maximum) -> None:
    """Takes in this step's keys if they are attended without exception, or end with the array."""
    plan = step.plan
    if plan.whole_blocks or plan.masked:
        whole = step.live() & step.whole()
        pl.when(whole)(lambda: quick(step, heads, plan.blocks.block_kv, maximum))
    if plan.tail and not plan.masked:
        pl.when(step.ends_here())(lambda: quick(step, heads, plan.tail, maximum))


def _odd(step: Step) -> Array:
    """Returns whether some keys of this step are not attended, other than past the last one."""
    return step.live() & ~(step.whole() | step.ends_here())


def _finish(step: Step, head: int) -> None:
    """Writes the output, or the unnormalised sums, of this block of queries."""
    state, out = step.refs.state, step.of_head(step.refs.out, head)
    l = jnp.sum(state.l[head], axis=0, keepdims=True)  # noqa: E741
    if step.plan.partials:
        out[...] = state.o[head].T
        step.refs.out_m[head] = state.used[head]
        step.refs.out_l[head] = l
    else:
        out[...] = (state.o[head] * jnp.where(l > 0, 1.0 / l, 0.0)).T.astype(step.plan.dtype)

"""The flash attention kernel: one grid step (batch, head tile, block of queries, block of keys).

Scores are transposed, S^T = K Q^T of [keys, queries]: maxima and sums then run over sublanes, the
state of a query (maximum, sum) is a row of lanes, and O^T = V^T P^T fills the MXU although a head
is only 128 wide. Blocks of keys that are fully attended, and a last one that ends with the array,
go through `unmasked_tile`; those cut by a mask or a length, and those whose maximum overflows the
headroom, go through `masked_tiles`.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from maxdiffusion.kernels.flash.config import NO_SCORE
from maxdiffusion.kernels.flash.fixed_m import CEILING_BITS
from maxdiffusion.kernels.flash.fp8 import fp8_queries
from maxdiffusion.kernels.flash.plan import KernelPlan
from maxdiffusion.kernels.flash.tiles import (
    Maximum,
    Ref,
    Refs,
    Step,
    masked_tiles,
    overflowed,
    rollback,
    unmasked_tile,
)
from maxdiffusion.kernels.tpu import BF16_SUBLANES, LANES

Work = Iterator[tuple[Array, Callable[[], None]]]
"""Conditions and what is done under each, in the order in which they are computed."""


def attend(plan: KernelPlan, *refs: Ref) -> None:
    """Runs one grid step: the kernel that `pallas_call` is given."""
    step = Step(plan, Refs.named(plan, refs))
    pl.when(step.kv_block == 0)(functools.partial(_start, step))
    if plan.fixed_m:
        for head in step.heads:
            fixed = step.is_fixed(head)
            pl.when(fixed)(functools.partial(_run, _pinned_work(step, head)))
            pl.when(~fixed)(functools.partial(_run, _running_work(step, [head])))
    else:
        for condition, work in _running_work(step, step.heads):
            pl.when(condition)(work)
    pl.when(step.kv_block == plan.kv_blocks - 1)(functools.partial(_finish, step))


def _run(work: Work) -> None:
    for condition, function in work:
        pl.when(condition)(function)


def _start(step: Step) -> None:
    if step.plan.shift_in_product:
        _keep_weights(step)
    for head in step.heads:
        _start_queries(step, head)
        _start_state(step, head, _sample(step, head))


def _keep_weights(step: Step) -> None:
    """Writes the first rows of the weights, which are not read before a tile writes them again.

    Where only one tile of the program uses this memory, the compiler would remove it, pass weights
    from stores to loads, and spill them in float32: 6,169 bundles instead of 5,947 for 7680 keys.
    """
    weights = step.refs.weights
    weights[:BF16_SUBLANES] = jnp.zeros((BF16_SUBLANES, weights.shape[1]), step.plan.dtype)


def _start_queries(step: Step, head: int) -> None:
    """Scales the queries in float32, rounds them once and transposes them.

    For bfloat16 the rounding moves a score by at most 2**-9 sum_h |q_h k_h| / sqrt(H), no more than
    the rounding of q itself did; for float32 by 2**-24 of the same.
    """
    plan = step.plan
    q = step.of_head(step.refs.q, head)[...].astype(jnp.float32)
    if plan.shape.q_len % plan.blocks.block_q:
        # The last block ends past the array, where the bits are arbitrary.
        row = step.q_block * plan.blocks.block_q + lax.broadcasted_iota(jnp.int32, (len(q), 1), 0)
        q = jnp.where(row < plan.shape.q_len, q, 0.0)
    qt = (q * plan.score_scale).T
    if plan.fp8:
        step.refs.qt[head], scale = fp8_queries(qt)
        step.refs.q_scale[head] = scale * step.key_scale(head)
    else:
        step.refs.qt[head] = qt.astype(plan.dtype)


def _start_state(step: Step, head: int, shift: Array) -> None:
    """Begins with nothing, or with the sums over the keys of earlier calls."""
    state = step.refs.state
    if step.plan.carried:
        m_acc = _carried(step, head)
        shift = jnp.maximum(shift, m_acc)
    else:
        state.o[head] = jnp.zeros(state.o.shape[1:], jnp.float32)
        state.l[head] = jnp.zeros(state.l.shape[1:], jnp.float32)
        m_acc = shift
    if step.plan.fixed_m:
        fixed, pinned = step.is_fixed(head), _pinned(step, head)
        m_acc, shift = (jnp.where(fixed, pinned, x) for x in (m_acc, shift))
    state.m_acc[head] = m_acc
    state.m_next[head] = shift


def _carried(step: Step, head: int) -> Array:
    """Takes over o and l of earlier keys; returns the shift that they are relative to."""
    plan, state, before = step.plan, step.refs.state, step.refs.before
    assert before is not None
    o, m, l = before.o[head], before.m[head], before.l[head]  # noqa: E741
    if plan.shape.q_len % plan.blocks.block_q:
        # Past the array the bits are arbitrary; they must not reach the maximum over all queries.
        query = lax.broadcasted_iota(jnp.int32, m.shape, 1)
        there = step.q_block * plan.blocks.block_q + query < plan.shape.q_len
        o, m, l = (jnp.where(there, x, 0.0) for x in (o, m, l))  # noqa: E741
    row = lax.broadcasted_iota(jnp.int32, state.l.shape[1:], 0)
    state.o[head] = o
    state.l[head] = jnp.where(row == 0, l, 0.0)
    return m


def _sample(step: Step, head: int) -> Array:
    """Returns the largest score among the first 128 keys: a shift for the first block."""
    products = step.dot_qk(step.keys(head, pl.ds(0, LANES)), step.refs.qt[head, :, slice(None)])
    s = step.scaled(products, head, slice(None))
    s = jnp.where(step.attended(0, LANES), s, NO_SCORE)
    return jnp.max(s, axis=0, keepdims=True)


def _pinned(step: Step, head: int) -> Array:
    """Returns ||q_i|| max_j ||k_j|| - C, the fixed shift of every query."""
    qt = step.refs.qt[head].astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(qt * qt, axis=0, keepdims=True))
    return norm * step.key_norm(head) - CEILING_BITS * step.plan.options.exponent.per_bit


def _pinned_work(step: Step, head: int) -> Work:
    """Yields the work of a head with a fixed bound, each part with its condition."""
    yield from _unmasked_work(step, [head], Maximum.PINNED)
    if step.plan.selective:
        yield _needs_mask(step), masked_tiles(step, head, Maximum.PINNED)


def _running_work(step: Step, heads: Sequence[int]) -> Work:
    """Yields the work of heads with a running maximum, each part with its condition.

    A block whose maximum overflowed the headroom is rolled back and repeated with masks.
    """
    yield from _unmasked_work(step, heads, Maximum.RUNNING)
    again = overflowed(step, heads)
    needs_mask = jnp.bool_(False)
    if step.plan.selective:
        needs_mask = _needs_mask(step)
        again = again & step.live() & ~needs_mask
    yield again, functools.partial(rollback, step, heads)
    for head in heads:
        yield again | needs_mask, masked_tiles(step, head, Maximum.RUNNING)


def _unmasked_work(step: Step, heads: Sequence[int], maximum: Maximum) -> Work:
    """Yields what adds this step's keys if all are attended, or if they end with the array."""
    plan = step.plan
    if plan.one_form:
        ends = step.live() & (step.fully_attended() | step.ends_here())
        yield ends, functools.partial(unmasked_tile, step, heads, plan.tail, maximum)
        return
    if plan.whole_blocks or plan.masked:
        fully_attended = step.live() & step.fully_attended()
        size = plan.blocks.block_kv
        yield fully_attended, functools.partial(unmasked_tile, step, heads, size, maximum)
    if plan.tail and not plan.masked:
        yield step.ends_here(), functools.partial(unmasked_tile, step, heads, plan.tail, maximum)


def _needs_mask(step: Step) -> Array:
    """Returns whether some keys of this step are not attended, other than past the last one."""
    return step.live() & ~(step.fully_attended() | step.ends_here())


def _finish(step: Step) -> None:
    for head in step.heads:
        _write(step, head)


def _write(step: Step, head: int) -> None:
    """Writes the output, or the unnormalised sums, of this block of queries."""
    state, out = step.refs.state, step.refs.out
    l = jnp.sum(state.l[head], axis=0, keepdims=True)  # noqa: E741
    if step.plan.partials:
        out[head] = state.o[head]
        step.refs.out_m[head] = state.m_acc[head]
        step.refs.out_l[head] = l
        return
    if step.plan.log_sum:
        per_nat = step.plan.options.exponent.per_nat
        step.refs.out_l[head] = state.m_acc[head] * (1.0 / per_nat) + jnp.log(l)
    rows = (state.o[head] * jnp.where(l > 0, 1.0 / l, 0.0)).T.astype(step.plan.dtype)
    step.of_head(out, head)[...] = rows

"""Attention of what projections wrote: one pass that lays out heads, against plain array code."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxdiffusion.attention import (
    AttentionOptions,
    AttentionProblem,
    plan_attention,
    plan_cross_attention,
)
from maxdiffusion.attention.plan import columns_spec, merge_heads
from maxdiffusion.kernels.qk_prep import ProjectedHeads, heads_of
from maxdiffusion.mesh import CONTEXT_AXES
from tests.attention.cases import QUICK, mesh_of

LENGTH, HEADS, WIDTH = 64, 3, 128
# Both sides round alike; in between they add float32 in another order: sums of 3 x 128 squares,
# of 128 products and of 64 weights, a few roundoffs each.
NOISE = 64 * 2.0**-24
MESH = mesh_of((1, 1, 2, 2, 1))


def columns(seed, *, length=LENGTH, batch=2, heads=HEADS, normed=True, turned=True):
    rng = np.random.default_rng(seed)
    angles = rng.uniform(-3, 3, (length, WIDTH // 2)).astype(np.float32)
    draw = rng.standard_normal((batch, length, heads * WIDTH)).astype(np.float32)
    gain = 1 + 0.1 * rng.standard_normal(heads * WIDTH).astype(np.float32)
    return ProjectedHeads(
        values=jnp.asarray(draw),
        gain=jnp.asarray(gain) if normed else None,
        cosines=jnp.cos(angles) if turned else None,
        sines=jnp.sin(angles) if turned else None,
        eps=1e-6,
    )


def problem(keys=LENGTH):
    sizes = {"heads": HEADS, "head_dim": WIDTH, "dtype": np.dtype("float32")}
    return AttentionProblem(batch=2, q_len=LENGTH, kv_len=keys, **sizes)


def projected(plan, q, *keys_values):
    return plan.attend_projected(
        q, *(plan.send_keys(plan.scatter_keys(part)) for part in keys_values)
    )


def attended(plan, *parts):
    arrays, tree = jax.tree.flatten(parts)

    def attend(*arrays):
        parts = jax.tree.unflatten(tree, arrays)
        if plan.fused:
            return projected(plan, *parts)
        return merge_heads(plan(*(heads_of(part, WIDTH) for part in parts)))

    with jax.set_mesh(plan.mesh):
        run = jax.jit(attend).lower(*arrays).compile(compiler_options=QUICK)
    return np.asarray(run(*arrays))


def gradients(plan, *parts):
    """Returns the gradients of all columns, gains and angles for a fixed gradient of the output."""
    arrays, tree = jax.tree.flatten(parts)
    weights = jnp.asarray(
        np.random.default_rng(4).standard_normal(parts[0].values.shape), "float32"
    )

    def loss(*arrays):
        parts = jax.tree.unflatten(tree, arrays)
        if plan.fused:
            return jnp.sum(projected(plan, *parts) * weights)
        return jnp.sum(merge_heads(plan(*(heads_of(part, WIDTH) for part in parts))) * weights)

    with jax.set_mesh(plan.mesh):
        every = jax.grad(loss, argnums=tuple(range(len(arrays))))
        run = jax.jit(every).lower(*arrays).compile(compiler_options=QUICK)
    return [np.asarray(x) for x in run(*arrays)]


def placed(part, spec):
    """The columns as a model has them: split along the sequence already."""
    values = jax.device_put(part.values, NamedSharding(MESH, columns_spec(spec)))
    if part.cosines is None:
        return replace(part, values=values)
    rows = NamedSharding(MESH, PartitionSpec(CONTEXT_AXES, None))
    turn = {name: jax.device_put(getattr(part, name), rows) for name in ("cosines", "sines")}
    return replace(part, values=values, **turn)


@pytest.mark.slow
def test_heads_placed_in_one_pass_attend_alike():
    """Three heads of two rows on two devices, in two groups: one slot stays empty."""
    options = AttentionOptions(ulysses_attention_chunks=2)
    plan = plan_attention("ulysses_ring_custom", problem(), MESH, options)
    assert not plan.fused
    parts = [columns(1), columns(2), columns(3, normed=False, turned=False)]
    parts = [placed(part, plan.problem.q_spec) for part in parts]
    plain, fused = attended(plan, *parts), attended(replace(plan, fused=True), *parts)
    np.testing.assert_allclose(fused, plain, rtol=0, atol=NOISE * np.abs(plain).max())
    both = (gradients(one, *parts) for one in (plan, replace(plan, fused=True)))
    for plain, fused in zip(*both, strict=True):
        np.testing.assert_allclose(fused, plain, rtol=0, atol=4 * NOISE * np.abs(plain).max())


def test_queries_of_text_are_normed_in_one_pass_too():
    plan = plan_cross_attention("ulysses_ring_custom", problem(keys=20), MESH)
    query = placed(columns(1, turned=False), plan.problem.q_spec)
    text = [columns(seed, length=20, normed=False, turned=False) for seed in (2, 3)]
    plain, fused = (attended(one, query, *text) for one in (plan, replace(plan, fused=True)))
    np.testing.assert_allclose(fused, plain, rtol=0, atol=NOISE * np.abs(plain).max())


@pytest.mark.parametrize("name", ["ulysses_ring_custom", "ulysses_ring", "dot_product"])
def test_plain_array_code_runs_away_from_tpus(name):
    assert not plan_attention(name, problem(), MESH).fused

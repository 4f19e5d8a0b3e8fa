"""Attention to keys that all stay in VMEM, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.attention import AttentionProblem, plan_cross_attention
from maxdiffusion.kernels.flash.config import Exponent, FlashOptions, FlashShape
from maxdiffusion.kernels.flash.resident import BLOCK_Q, TILE_Q, ResidentPlan, resident_attention
from maxdiffusion.kernels.tpu import LANES, VMEM_BYTES
from maxdiffusion.mesh import single_device_mesh

ULP = 2.0**-8  # of bfloat16, relative; rounding moves by half of it


def drawn(q_len, kv_len, *, batch=1, heads=1, kv_heads=1, size=1.0, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(batch, q_len, heads), (batch, kv_len, kv_heads), (batch, kv_len, kv_heads)]
    q, k, v = (rng.standard_normal((*shape, LANES), np.float32) for shape in shapes)
    return [jnp.asarray(x, jnp.bfloat16) for x in (size * q, k, v)]


def exact(q, k, v):
    """The attention in float64, and a bound on the error of bfloat16 arithmetic for each value."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bsnh,btnh->bnst", q, k) * LANES**-0.5
    # Scaled keys are rounded once; a weight moves by the error of its score, then is rounded.
    moved = np.einsum("bsnh,btnh->bnst", np.abs(q), np.abs(k)) * LANES**-0.5 * ULP / 2
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = np.einsum("bnst,btnh->bsnh", p, v)
    share = np.expm1(np.minimum(moved.max(-1), 50.0)) + ULP
    reach = np.einsum("bnst,btnh->bsnh", p, np.abs(v))
    # Numerator and denominator move by that share, and the result is rounded.
    return out, 2 * share.transpose(0, 2, 1)[..., None] * reach + ULP * np.abs(out) + 1e-6


@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "kv_heads"),
    [
        (300, 512, 2, 2),
        (200, 77, 2, 1),  # fewer keys than lanes, shared by two heads
        (TILE_Q + 130, 257, 1, 1),  # two tiles; keys end inside a row of lanes
        (BLOCK_Q + 5, 128, 1, 1),  # two blocks
        (64, 1, 1, 1),
        (128, 1024, 1, 1),
    ],
)
def test_it_is_attention(q_len, kv_len, heads, kv_heads):
    q, k, v = drawn(q_len, kv_len, batch=2 if q_len < 300 else 1, heads=heads, kv_heads=kv_heads)
    out = resident_attention(q, k, v, options=FlashOptions(interpret=True))
    wanted, bound = exact(q, k, v)
    assert out.dtype == jnp.bfloat16
    assert np.all(np.abs(np.asarray(out, np.float64) - wanted) <= bound)


def test_keys_past_the_length_do_not_count():
    q, k, v = drawn(130, 384)
    poison = jnp.where(jnp.arange(384)[None, :, None, None] < 300, 0.0, jnp.nan).astype(k.dtype)
    options = FlashOptions(interpret=True, exponent=Exponent.NATURAL)
    out = resident_attention(q, k + poison, v + poison, options=options, kv_len=300)
    wanted, bound = exact(q, k[:, :300], v[:, :300])
    assert np.all(np.abs(np.asarray(out, np.float64) - wanted) <= bound)


@pytest.mark.parametrize("late", [130, 511])
def test_a_key_far_above_the_first_ones_wins(late):
    """The shift comes from the first 128 keys; this one exceeds it by more than the headroom."""
    q, k, v = drawn(200, 512, size=0.1)
    k = k.at[0, late].set(q[0, 7] * 0 + 60.0)
    q = q.at[0, 7].set(60.0)
    out = resident_attention(q, k, v, options=FlashOptions(interpret=True))
    assert np.isfinite(np.asarray(out, np.float32)).all()
    np.testing.assert_array_equal(out[0, 7], v[0, late])
    wanted, bound = exact(q[:, 8:], k, v)
    assert np.all(np.abs(np.asarray(out[:, 8:], np.float64) - wanted) <= bound)


def test_every_plan_fits_the_smallest_chip():
    for kv_len in (1, 512, 1024):
        for q_len in (1, 4096, 18904, 75600):
            shape = FlashShape(
                batch=1,
                q_len=q_len,
                kv_len=kv_len,
                heads=40,
                kv_heads=40,
                head_dim=LANES,
                dtype="bfloat16",
            )
            plan = ResidentPlan(shape=shape, kv_len=kv_len, options=FlashOptions())
            assert plan.vmem_limit < min(VMEM_BYTES.values())
            assert sum(width for _, width in plan.tiles) == plan.block_q


@pytest.mark.parametrize(("dtype", "stays"), [("bfloat16", True), ("float32", False)])
def test_text_attention_keeps_its_keys(dtype, stays):
    mesh = single_device_mesh(jax.devices()[0])
    problem = AttentionProblem(
        batch=1, q_len=256, kv_len=512, heads=2, head_dim=LANES, dtype=jnp.dtype(dtype)
    )
    plan = plan_cross_attention("ulysses_custom", problem, mesh)
    assert plan.backend.keeps_keys is stays
    assert ("all keys in VMEM" in plan.describe()) is stays
    q, k, v = (x.astype(dtype) for x in drawn(256, 512, heads=2, kv_heads=2))
    wanted, bound = exact(q, k, v)
    assert np.all(np.abs(np.asarray(plan(q, k, v), np.float64) - wanted) <= bound)

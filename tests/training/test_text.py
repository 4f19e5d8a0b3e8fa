"""The padding row that counts many times is the same as many padding rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.attention import AttentionProblem, plan_cross_attention
from maxdiffusion.mesh import single_device_mesh
from maxdiffusion.models.abstract import AbstractModel
from maxdiffusion.training.text import (
    TEXT_ENCODER,
    Captions,
    EncodedCaptions,
    RepeatedRowAttention,
    padded_ids,
)
from tests.training.tiny_training import CAPTION_TOKENS, state_of, training


def plan(keys):
    problem = AttentionProblem(
        batch=2, q_len=5, kv_len=keys, heads=2, head_dim=8, dtype=jnp.dtype(jnp.float32)
    )
    return plan_cross_attention("dot_product", problem, single_device_mesh())


@pytest.mark.slow
def test_one_row_that_counts_is_as_many_rows():
    draws = [jax.random.normal(jax.random.key(n), (2, 5 if n == 0 else 4, 2, 8)) for n in range(3)]
    q, k, v = draws
    long_k, long_v = (jnp.concatenate([x[:, :3], *[x[:, 3:]] * 9], axis=1) for x in (k, v))
    whole = plan(12)(q, long_k, long_v)
    short = RepeatedRowAttention(plan=plan(4), repeats=9)(q, k, v)
    np.testing.assert_allclose(short, whole, atol=1e-6)  # sums of 12 terms below 3 in float32
    with pytest.raises(ValueError, match="at least 1"):
        RepeatedRowAttention(plan=plan(4), repeats=0)


def test_rows_end_in_zeros_and_dropped_captions_are_the_empty_one():
    run = training()
    values = state_of(run).values
    reader = EncodedCaptions(
        encoder=AbstractModel.of(run.build_text_encoder), empty=(1,), dropout=0.5
    )
    captions = Captions(
        ids=jnp.asarray(padded_ids([(5, 6, 7, 1)] * 64, CAPTION_TOKENS)),
        lengths=jnp.full(64, 4),
    )
    rows = np.asarray(reader(values, captions, jax.random.key(0)))
    assert rows.shape == (64, CAPTION_TOKENS + 1, 16)
    assert not rows[:, 4:].any()
    empty = run.models[TEXT_ENCODER].merge(values[TEXT_ENCODER])(
        jnp.asarray([[1]]), jnp.asarray([[1]])
    )
    dropped = ~rows[:, 1].any(axis=-1)
    # Half of 64, within four standard deviations.
    assert 16 < dropped.sum() < 48
    np.testing.assert_allclose(
        rows[dropped, 0], np.broadcast_to(empty[0], (dropped.sum(), 16)), atol=1e-6
    )


def test_long_captions_are_refused():
    with pytest.raises(ValueError, match="4 tokens: at most 3"):
        padded_ids([(1, 2, 3, 4)], 3)

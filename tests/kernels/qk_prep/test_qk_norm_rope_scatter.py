"""Heads in their layout: one pass of the kernel against plain array code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.kernels.qk_prep import (
    HeadLayout,
    ProjectedHeads,
    gather_heads,
    heads_of,
    qk_norm_rope_scatter,
)

HEAD_DIM, HEADS, ROWS = 128, 3, 70
# Both sides round to the dtype at the same places and in between compute in float32 in another
# order: eight roundoffs of 2**-24 from the sum of 384 squares, its root, four products and a sum.
# In bfloat16 that may move a number to its neighbour before the turn and after it: twice 2**-7.
NOISE = {"float32": 2.0**-21, "bfloat16": 2.0**-6}
# As seldom as the float32 noise is small beside the distance between numbers of bfloat16.
MOVED = 0.01
SPLIT = HeadLayout(
    # Two groups of two devices; six heads of two batch rows in eight slots.
    arrays=((2, 2), (2, 2)),
    heads=(((0, 0, 0), (0, 0, 1), (0, 1, 0)), ((0, 1, 1), (1, 0, 0), (1, 0, 1))),
)


def columns(
    dtype: str, *, batch: int = 2, normed: bool = True, turned: bool = True
) -> ProjectedHeads:
    keys = jax.random.split(jax.random.key(7), 3)
    angles = jax.random.uniform(keys[1], (ROWS, HEAD_DIM // 2), minval=-3, maxval=3)
    width = HEADS * HEAD_DIM
    return ProjectedHeads(
        values=(3 * jax.random.normal(keys[0], (batch, ROWS, width))).astype(dtype),
        gain=(1 + 0.1 * jax.random.normal(keys[2], (width,))).astype(dtype) if normed else None,
        cosines=jnp.cos(angles) if turned else None,
        sines=jnp.sin(angles) if turned else None,
        eps=1e-6,
    )


def at(arrays: list, position: tuple[int, int, int]) -> np.ndarray:
    array, block, slot = position
    return np.asarray(arrays[array], np.float32)[block, :, slot * HEAD_DIM : (slot + 1) * HEAD_DIM]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize("turned", [True, False], ids=["turned", "straight"])
def test_every_head_is_what_plain_code_makes_of_it(dtype, normed, turned):
    made = columns(dtype, normed=normed, turned=turned)
    arrays = qk_norm_rope_scatter(made, SPLIT, head_dim=HEAD_DIM, interpret=True)
    wanted = np.asarray(heads_of(made, HEAD_DIM), np.float32)
    for row, positions in enumerate(SPLIT.heads):
        for head, position in enumerate(positions):
            got, right = at(arrays, position), wanted[row, :, head]
            # A turned feature is a sum of two, so its error is relative to the pair.
            size = np.abs(right).max(axis=-1, keepdims=True)
            assert np.all(np.abs(got - right) <= NOISE[dtype] * size)
            assert dtype == "float32" or np.mean(got != right) < MOVED


def test_slots_without_a_head_are_zero():
    arrays = qk_norm_rope_scatter(columns("float32"), SPLIT, head_dim=HEAD_DIM, interpret=True)
    assert SPLIT.empty_slots() == [(1, 1, 0), (1, 1, 1)]
    assert not any(at(arrays, position).any() for position in SPLIT.empty_slots())


def test_joining_brings_every_head_back():
    made = columns("bfloat16", normed=False, turned=False)
    arrays = qk_norm_rope_scatter(made, SPLIT, head_dim=HEAD_DIM, interpret=True)
    back = gather_heads(arrays, SPLIT, head_dim=HEAD_DIM, interpret=True)
    assert jnp.array_equal(back, made.values)


def test_nothing_runs_where_nothing_is_to_be_done():
    made = columns("float32", normed=False, turned=False)
    home = HeadLayout.identity(2, HEADS)
    (same,) = qk_norm_rope_scatter(made, home, head_dim=HEAD_DIM)
    assert same is made.values
    assert gather_heads([same], home, head_dim=HEAD_DIM) is same


def exact_gradient(made: ProjectedHeads, d_heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the gradients of columns and gain in float64: of y = turn(x g / rms(x))."""
    x, gain, cos, sin = (
        np.asarray(a, np.float64) for a in (made.values, made.gain, made.cosines, made.sines)
    )
    first, second = np.split(d_heads.reshape(*x.shape[:2], HEADS, HEAD_DIM), 2, axis=-1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    turned = np.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)
    d_normed = turned.reshape(x.shape)
    inverse = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + made.eps)
    along = np.mean(d_normed * gain * x, axis=-1, keepdims=True)
    return inverse * (gain * d_normed - x * inverse**2 * along), np.sum(
        d_normed * x * inverse, axis=(0, 1)
    )


# Half the spacing above one: sums in float32 add eight of theirs, as in the forward pass.
ROUNDED = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("known", ["before", "when the program runs"])
def test_gradients_are_those_of_float64(dtype, known):
    made = columns(dtype)
    order = None if known == "before" else jnp.asarray(SPLIT.order(), jnp.int32)
    settings = {"head_dim": HEAD_DIM, "interpret": True, "order": order}
    weights = jax.random.normal(jax.random.key(8), made.values.shape).astype(dtype)

    @jax.jit
    def gradient(made: ProjectedHeads) -> ProjectedHeads:
        def loss(made: ProjectedHeads) -> jax.Array:
            arrays = qk_norm_rope_scatter(made, SPLIT, **settings)
            back = gather_heads(arrays, SPLIT, **settings)
            return jnp.sum(back.astype(jnp.float32) * weights.astype(jnp.float32))

        return jax.grad(loss)(made)

    got = gradient(made)
    d_values, d_gain = exact_gradient(made, np.asarray(weights, np.float64))
    bound = ROUNDED[dtype] + 8 * 2.0**-24
    # The two terms of a column's gradient, and the pair of features that were turned.
    size = np.abs(d_values) + np.abs(d_values).max(axis=-1, keepdims=True)
    assert got.values.dtype == got.gain.dtype == made.values.dtype
    assert np.all(np.abs(np.asarray(got.values, np.float64) - d_values) <= bound * size)
    terms = np.sqrt(made.values.shape[0] * ROWS) * 2.0**-24 * 4
    assert np.all(
        np.abs(np.asarray(got.gain, np.float64) - d_gain)
        <= ROUNDED[dtype] * np.abs(d_gain) + terms * np.abs(d_gain).max()
    )

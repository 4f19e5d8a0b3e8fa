"""Moments in fewer bits: errors of one rounding, means of many, and what zeros become."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxdiffusion.training.memory.moments import (
    BLOCK,
    FIRST,
    SECOND,
    MomentsFormat,
    Packed,
    pack_moments,
    stochastic_bfloat16,
    unpack_moments,
)

KEY = jax.random.key(3)


def drawn(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def neighbours(coding, share):
    """The shares of the codes below and above each share of a block's maximum."""
    low = np.clip(np.floor(share ** (1 / coding.power) * coding.levels), 0, coding.levels - 1)
    return (low / coding.levels) ** coding.power, ((low + 1) / coding.levels) ** coding.power


@pytest.mark.parametrize("shape", [(3, 2 * BLOCK), (5,), (2, 7), ()])
def test_a_code_is_one_of_two_neighbours(shape):
    x = drawn(shape)
    found = np.asarray(FIRST.unpack(FIRST.pack(jnp.asarray(x), KEY)))
    size = BLOCK if shape and shape[-1] % BLOCK == 0 else (shape[-1] if shape else 1)
    blocks = np.abs(x).reshape(-1, size)
    scale = blocks.max(axis=1, keepdims=True)
    low, high = neighbours(FIRST, blocks / scale)
    off = np.abs(np.abs(found).reshape(-1, size) - blocks)
    # Six roundings of float32 between the share and the value of its code.
    assert np.all(off <= (high - low) * scale + 6 * 2**-24 * scale)
    assert np.all((np.sign(found) == np.sign(x)) | (found == 0))


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
def test_many_roundings_have_the_value_as_their_mean(kept):
    x = drawn((2, BLOCK)) ** 2

    def rounded(key):
        if kept == "bfloat16":
            return stochastic_bfloat16(jnp.asarray(x), key).astype(jnp.float32)
        return SECOND.unpack(SECOND.pack(jnp.asarray(x), key))

    mean = np.asarray(jax.vmap(rounded)(jax.random.split(KEY, 400)).mean(axis=0))
    scale = x.max(axis=1, keepdims=True)
    low, high = neighbours(SECOND, x / scale)
    gap = 2**-7 * x if kept == "bfloat16" else (high - low) * scale
    # Hoeffding: the mean of 400 draws is off by more than gap / 8 once in 140,000 values.
    assert np.all(np.abs(mean - x) <= gap / 8 + 1e-6 * x)


def test_a_second_moment_is_never_rounded_to_zero():
    x = jnp.asarray([1.0, 1e-20] + [0.0] * (BLOCK - 2))
    found = np.asarray(SECOND.unpack(SECOND.pack(x, KEY)))
    assert found.min() == pytest.approx(255.0**-4, rel=1e-5)
    zeros = SECOND.pack(jnp.zeros((BLOCK,)), KEY)
    assert np.all(np.asarray(SECOND.unpack(zeros)) == 0)


def adam_state(values):
    return optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.0)).init(values)


@pytest.mark.parametrize(("kept", "size"), [("bfloat16", 2), ("int8", 1 + 4 / BLOCK)])
def test_moments_take_fewer_bytes(kept, size):
    state = adam_state({"w": jnp.ones((4, 2 * BLOCK)), "b": jnp.ones((BLOCK,))})
    packed = pack_moments(state, MomentsFormat(kept), KEY)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((packed[0].mu, packed[0].nu)))
    assert held == 2 * size * (4 * 2 * BLOCK + BLOCK)
    back = unpack_moments(packed, MomentsFormat(kept))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert isinstance(packed[0].mu["w"], Packed) == (kept == "int8")


def test_float32_is_left_as_it_is():
    state = adam_state({"w": jnp.ones(3)})
    assert pack_moments(state, MomentsFormat.FLOAT32, KEY) is state


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
def test_a_slow_moment_moves(kept):
    """Rounding to nearest would keep the second moment at its start: b2 = 0.999."""
    rule = optax.chain(optax.scale_by_adam(b2=0.999), optax.add_decayed_weights(0.0))
    values = {"w": jnp.zeros((BLOCK,))}
    gradient = {"w": jnp.linspace(0.5, 1.5, BLOCK)}

    def step(state, key):
        exact = unpack_moments(state, MomentsFormat(kept))
        with jax.numpy_dtype_promotion("standard"):
            _, exact = rule.update(gradient, exact, values)
        return pack_moments(exact, MomentsFormat(kept), key), None

    start = pack_moments(rule.init(values), MomentsFormat(kept), KEY)
    end, _ = jax.lax.scan(step, start, jax.random.split(KEY, 300))
    found = unpack_moments(end, MomentsFormat(kept))[0].nu["w"]
    wanted = (1 - 0.999**300) * np.asarray(gradient["w"]) ** 2
    assert np.mean(np.asarray(found) / wanted) == pytest.approx(1, abs=0.02)

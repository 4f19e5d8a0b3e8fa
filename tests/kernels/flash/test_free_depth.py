"""Values that a product adds in the free depth of the MXU: exact terms, and where there is room."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.kernels.flash import FlashOptions, FlashShape, Product, plan_kernel
from maxdiffusion.kernels.flash.config import NO_SCORE
from maxdiffusion.kernels.flash.free_depth import (
    TERMS,
    bf16_terms,
    with_ones,
    with_terms,
)
from tests.kernels.flash.cases import Case, error, expected, run, small_blocks, tolerance


def test_three_terms_of_bfloat16_are_a_float32() -> None:
    random = jax.random.normal(jax.random.key(0), (1, 500)) * 10.0 ** jnp.arange(-20, 30, 0.1)[None]
    x = jnp.concatenate([random, jnp.float32([[0.0, 1.0, NO_SCORE, -1 / 3]])], axis=1)
    terms = jax.jit(bf16_terms)(x)
    assert len(terms) == TERMS
    for term in terms:
        assert jnp.array_equal(term.astype(jnp.bfloat16).astype(jnp.float32), term)
    assert np.array_equal(sum(np.float64(term) for term in terms), np.float64(x))


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_a_product_takes_up_the_value_of_each_query(size: float) -> None:
    keys, queries = (jax.random.normal(jax.random.key(i), (128, 128)) for i in (1, 2))
    keys, queries = keys.astype(jnp.bfloat16), queries.astype(jnp.bfloat16)
    x = size * jax.random.normal(jax.random.key(3), (1, 128))
    wide = [a.astype(jnp.float32) for a in (with_ones(keys), with_terms(queries, x))]
    got = jnp.matmul(*wide, precision="highest")
    exact = np.float64(keys) @ np.float64(queries) + np.float64(x)
    # 131 additions of values up to the largest partial sum, half a unit of float32 each.
    reach = np.abs(np.float64(keys)) @ np.abs(np.float64(queries)) + np.abs(np.float64(x))
    assert np.all(np.abs(np.float64(got) - exact) <= 131 * 2.0**-24 * reach)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "chip", "room"),
    [
        (128, "bfloat16", "v6e", True),
        (128, "bfloat16", "tpu7x", True),
        (384, "bfloat16", "tpu7x", True),
        (256, "bfloat16", "tpu7x", False),
        (64, "bfloat16", "tpu7x", False),
        (128, "float32", "tpu7x", False),
        (128, "bfloat16", "v5e", False),
        (128, "bfloat16", "v5p", False),
    ],
)
def test_there_is_room_next_to_half_an_mxu(
    head_dim: int, dtype: str, chip: str, *, room: bool
) -> None:
    sizes = {"batch": 1, "q_len": 256, "kv_len": 256, "heads": 1, "kv_heads": 1}
    shape = FlashShape(**sizes, head_dim=head_dim, dtype=dtype)
    plan = plan_kernel(shape, small_blocks(), FlashOptions(chip=chip))
    assert plan.shift_in_product is room


def test_float8_fills_the_depth_with_keys() -> None:
    sizes = {"batch": 1, "q_len": 256, "kv_len": 256, "heads": 1, "kv_heads": 1}
    shape = FlashShape(**sizes, head_dim=128, dtype="bfloat16")
    for product, shifts in ((Product.NATIVE, True), (Product.FP8, False)):
        plan = plan_kernel(shape, small_blocks(), FlashOptions(product=product))
        assert plan.shift_in_product is shifts


@pytest.mark.parametrize(
    ("keys", "block_kv", "kind", "one"),
    [
        (300, 128, {}, True),
        (300, 128, {"lengths": True}, True),
        (300, 128, {"masked": True}, False),
        (420, 256, {}, True),
        (380, 256, {}, False),
        (256, 128, {}, False),
        (100, 128, {}, False),
    ],
)
def test_even_blocks_of_keys_have_one_form(
    keys: int, block_kv: int, kind: dict[str, bool], *, one: bool
) -> None:
    sizes = {"batch": 1, "q_len": 256, "heads": 1, "kv_heads": 1, "head_dim": 128}
    shape = FlashShape(**sizes, kv_len=keys, dtype="bfloat16")
    blocks = small_blocks().updated({"block_kv": block_kv})
    assert plan_kernel(shape, blocks, FlashOptions(), **kind).one_form is one


@pytest.mark.parametrize("late", [3.0, 30.0, 3e3])
def test_a_maximum_that_jumps_late_is_exact_in_bfloat16(late: float) -> None:
    """A block above the shift of its product, within its headroom and past it."""
    case = Case(q_len=130, kv_len=384, heads=1, kv_heads=1, dtype="bfloat16")
    q, k, v = case.arrays()
    towards = q.astype(jnp.float32).mean(axis=1, keepdims=True)
    towards = towards / jnp.linalg.norm(towards, axis=-1, keepdims=True)
    k = k.at[:, 300:310].set((late * towards).astype(k.dtype))
    out = run(case, q, k, v)
    assert error(out, expected(case, q, k, v)) <= tolerance(case, q, k, v)

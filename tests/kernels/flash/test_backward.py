"""Gradients of the backward kernel against float64: shapes, masks, scales, and bad inputs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.kernels.flash import Exponent, FlashOptions, FlashShape, Product
from maxdiffusion.kernels.flash.backward import (
    flash_gradients,
    reference_gradients,
)
from maxdiffusion.kernels.flash.backward_plan import plan_backward, vmem_bytes, vmem_limit
from maxdiffusion.kernels.tpu import MIB, BlockSizes
from tests.kernels.flash.cases import Case
from tests.kernels.flash.gradients import Exact, exact_gradients
from tests.marking import slow_except

INTERPRETED = FlashOptions(interpret=True)


def backward_blocks(
    block_q: int = 128, block_kv: int = 128, tile: int = 128, resident: int = 0
) -> BlockSizes:
    return BlockSizes(
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=tile,
        block_q_dq=resident,
    )


CASES = {
    "ragged": Case(blocks=backward_blocks(block_kv=256)),
    "bfloat16, one block": Case(
        q_len=250, kv_len=256, dtype="bfloat16", blocks=backward_blocks(256, 256, 128)
    ),
    "shared keys, narrow heads, masks and lengths": Case(
        batch=2,
        heads=4,
        head_dim=64,
        lengths=(300, 170),
        masked=True,
        blocks=backward_blocks(256, 256),
    ),
    "queries in two calls, lengths": Case(
        batch=2, kv_len=140, lengths=(140, 20), blocks=backward_blocks(resident=128)
    ),
    "shared keys in two calls, bfloat16": Case(
        heads=4, dtype="bfloat16", blocks=backward_blocks(resident=256)
    ),
    "natural exponent": Case(
        head_dim=64,
        options=FlashOptions(interpret=True, exponent=Exponent.NATURAL),
        blocks=backward_blocks(),
    ),
}


def d_out_of(case: Case) -> jax.Array:
    shape = (case.batch, case.q_len, case.heads, case.head_dim)
    return jax.random.normal(jax.random.key(9), shape).astype(case.dtype)


def outcome_of(exact: Exact, d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.asarray(exact.out, jnp.float32), jnp.asarray(exact.log_sum, jnp.float32), d_out


def assert_within_bounds(got, exact: Exact) -> None:
    for actual, wanted, bound, spread in zip(
        got, exact.gradients, exact.bounds, exact.spreads, strict=True
    ):
        error = np.asarray(actual, np.float64) - wanted
        assert np.all(np.abs(error) <= bound)
        # The norm of thousands of errors is that of their deviations, within a few percent.
        assert np.linalg.norm(error) <= 1.2 * np.linalg.norm(spread)


MARGIN = 200
"""Zeros are at least this many times farther from a gradient than its errors may take it."""


def assert_nothing_else_is_within(exact: Exact) -> None:
    for wanted, spread in zip(exact.gradients, exact.spreads, strict=True):
        assert np.linalg.norm(wanted) > MARGIN * 1.2 * np.linalg.norm(spread)


RUN = jax.jit(flash_gradients, static_argnames=("blocks", "options", "out_dtype"))


def gradients_of(case: Case, qkv, outcome):
    return RUN(qkv, outcome, blocks=case.blocks, options=case.options, **case.selection())


@pytest.mark.parametrize("scale", [1.0, 8.0], ids=["usual", "peaked"])
@pytest.mark.parametrize("name", slow_except(["ragged", "bfloat16, one block"], CASES))
def test_gradients_are_those_of_float64(name, scale):
    case = CASES[name]
    q, k, v = case.arrays()
    q = q * jnp.asarray(scale, q.dtype)
    d_out = d_out_of(case)
    exact = exact_gradients(case, q, k, v, d_out)
    got = gradients_of(case, (q, k, v), outcome_of(exact, d_out))
    assert all(actual.dtype == jnp.float32 for actual in got)
    assert_within_bounds(got, exact)
    assert_nothing_else_is_within(exact)
    again = gradients_of(case, (q, k, v), outcome_of(exact, d_out))
    assert all(jnp.array_equal(x, y) for x, y in zip(got, again, strict=True))


def drawn(seed: int) -> tuple[Case, float]:
    """A problem of any shape, with masks, lengths and shared keys, and the size of its queries."""
    rng = np.random.default_rng(seed)
    batch, kv_heads, kv_len = (
        int(rng.integers(*limits)) for limits in ((1, 3), (1, 3), (129, 400))
    )
    case = Case(
        batch=batch,
        q_len=int(rng.integers(64, 400)),
        kv_len=kv_len,
        heads=kv_heads * int(rng.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=int(rng.choice([64, 128])),
        dtype=("bfloat16", "float32")[seed % 2],
        lengths=tuple(int(n) for n in rng.integers(129, kv_len + 1, batch)),
        masked=bool(rng.integers(2)),
        blocks=backward_blocks(*(int(128 * rng.integers(1, 3)) for _ in range(2))),
    )
    return case, float(10 ** rng.uniform(-1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [18, 19])
def test_gradients_of_drawn_problems_are_those_of_float64(seed):
    case, size = drawn(seed)
    (q, k, v), d_out = case.arrays(), d_out_of(case)
    q = q * jnp.asarray(size, q.dtype)
    exact = exact_gradients(case, q, k, v, d_out)
    assert_within_bounds(gradients_of(case, (q, k, v), outcome_of(exact, d_out)), exact)
    assert_nothing_else_is_within(exact)


ADVERSARIAL = {
    "all keys alike": lambda q, k, v, d_out: (q, k[:, :1] + 0 * k, v, d_out),
    "one key far above": lambda q, k, v, d_out: (q, k.at[:, 7].multiply(64), v, d_out),
    "no queries": lambda q, k, v, d_out: (0 * q, k, v, d_out),
    "huge gradients": lambda q, k, v, d_out: (q, k, v, 1e20 * d_out),
    "tiny gradients": lambda q, k, v, d_out: (q, k, v, 1e-20 * d_out),
    "cancelling values": lambda q, k, v, d_out: (q, k, v + 1e3, d_out),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_gradients_of_adversarial_inputs_are_those_of_float64(name):
    """Roundings may all go the same way here; the bound allows for it."""
    case = CASES["bfloat16, one block"]
    changed = ADVERSARIAL[name](*case.arrays(), d_out_of(case))
    q, k, v, d_out = (x.astype(case.dtype) for x in changed)
    exact = exact_gradients(case, q, k, v, d_out)
    got = gradients_of(case, (q, k, v), outcome_of(exact, d_out))
    for actual, wanted, bound in zip(got, exact.gradients, exact.worst, strict=True):
        assert np.all(np.abs(np.asarray(actual, np.float64) - wanted) <= bound)


def test_the_reference_is_that_of_float64():
    case = CASES["ragged"]
    (q, k, v), d_out = case.arrays(), d_out_of(case)
    exact = exact_gradients(case, q, k, v, d_out)
    got = reference_gradients((q, k, v), outcome_of(exact, d_out))
    assert_within_bounds(got, exact)


def test_gradients_over_shards_of_keys_add_up():
    case = Case(kv_len=256, blocks=backward_blocks())
    (q, k, v), d_out = case.arrays(), d_out_of(case)
    exact = exact_gradients(case, q, k, v, d_out)
    outcome = outcome_of(exact, d_out)
    halves = [slice(0, 128), slice(128, 256)]
    parts = [gradients_of(case, (q, k[:, half], v[:, half]), outcome) for half in halves]
    d_q = parts[0].d_q + parts[1].d_q
    d_k, d_v = (jnp.concatenate([p[i] for p in parts], axis=1) for i in (1, 2))
    assert_within_bounds((d_q, d_k, d_v), exact)


def test_padding_is_not_read_and_rows_without_keys_have_no_gradient():
    """Keys past a length and hidden keys are NaN; one row of the batch attends to nothing."""
    case = Case(batch=2, lengths=(130, 0), masked=True, blocks=backward_blocks())
    (q, k, v), d_out = case.arrays(), d_out_of(case)
    mask = jnp.zeros((2, case.kv_len), bool).at[0, 5:200].set(True)
    hidden = ~(mask & (jnp.arange(case.kv_len)[None] < jnp.array([130, 0])[:, None]))
    clean = [jnp.where(hidden[:, :, None, None], 0.0, x) for x in (k, v)]
    dirty = [jnp.where(hidden[:, :, None, None], jnp.nan, x) for x in (k, v)]
    log_sum = jnp.full(q.shape[:3], 3.0).at[1].set(-jnp.inf)
    outcome = q, log_sum, d_out
    selection = {"kv_len": jnp.array([130, 0], jnp.int32), "kv_mask": mask}
    settings = {"blocks": case.blocks, "options": INTERPRETED, **selection}
    run = jax.jit(lambda k, v: flash_gradients((q, k, v), outcome, **settings))
    got, wanted = run(*dirty), run(*clean)
    for x, y in zip(got, wanted, strict=True):
        assert jnp.array_equal(x, y)
        assert bool(jnp.all(jnp.isfinite(x)))
        assert not bool(jnp.any(x[1]))
        assert bool(jnp.any(x[0]))


@pytest.mark.parametrize("size", [1e4, 1e10, 1e17])
def test_huge_scores_leave_the_gradient_finite(size):
    case = Case(q_len=128, kv_len=128, blocks=backward_blocks())
    q, k, v = case.arrays()
    q, k, d_out = q * size, k * size, d_out_of(case)
    exact = exact_gradients(case, q, k, v, d_out)
    got = gradients_of(case, (q, k, v), outcome_of(exact, d_out))
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in got)


SHAPE = FlashShape(
    batch=1, q_len=75_600, kv_len=75_600, heads=5, kv_heads=5, head_dim=128, dtype="bfloat16"
)


@pytest.mark.parametrize(
    ("blocks", "options", "said"),
    [
        (backward_blocks(2048, 2048, 1024), FlashOptions(product=Product.FP8), "no gradient"),
        (backward_blocks(100, 2048, 1024), FlashOptions(), "multiple of 128"),
        (backward_blocks(512, 2048, 768), FlashOptions(), "must divide block_kv_dkv=2048"),
        (backward_blocks(8192, 32768, 1024), FlashOptions(), "MiB of VMEM, more than"),
        (BlockSizes(), FlashOptions(), "block_kv_dkv"),
    ],
)
def test_what_cannot_run_is_refused_before_it_is_traced(blocks, options, said):
    with pytest.raises(ProblemsFound, match=said):
        plan_backward(SHAPE, blocks, options)


def test_queries_are_cut_into_as_many_calls_as_they_need():
    def lengths(blocks: BlockSizes, **changes: int) -> list[int]:
        shape = replace(SHAPE, **changes)
        return [plan.shape.q_len for plan in plan_backward(shape, blocks, FlashOptions())]

    blocks = backward_blocks(2048, 4096, 1024)
    assert lengths(blocks, q_len=37_800) == [37_800]
    assert lengths(replace(blocks, block_q_dq=40_960)) == [37_888, 37_712]
    assert lengths(replace(blocks, block_q_dq=1024), q_len=1000, heads=10) == [512, 488]
    # 75 MiB of float32 for the gradient of twice as many queries.
    assert lengths(blocks, q_len=151_200) == [50_432, 50_432, 50_336]


def test_sums_over_several_calls_are_float32():
    (whole,) = plan_backward(
        SHAPE, backward_blocks(512, 1024, 1024), FlashOptions(), out_dtype="bfloat16"
    )
    assert whole.out_dtype == "bfloat16"
    parts = plan_backward(
        SHAPE, backward_blocks(512, 1024, 1024, 40_960), FlashOptions(), out_dtype="bfloat16"
    )
    assert {part.out_dtype for part in parts} == {"float32"}


# MiB of VMEM that libtpu 0.0.42 gave a call on tpu7x, by dtype, tokens and blocks.
COMPILED = [
    ("bfloat16", 4096, (2048, 2048, 1024), 13.94),
    ("bfloat16", 8192, (2048, 4096, 1024), 22.69),
    ("bfloat16", 75_600, (2048, 4096, 1024), 59.69),
    ("float32", 1024, (512, 512, 512), 10.79),
    ("float32", 2048, (512, 1024, 512), 16.05),
]


@pytest.mark.parametrize(("dtype", "tokens", "blocks", "mib"), COMPILED)
def test_vmem_agrees_with_the_compiler(dtype, tokens, blocks, mib):
    shape = replace(SHAPE, q_len=tokens, kv_len=tokens, dtype=dtype)
    (plan,) = plan_backward(shape, backward_blocks(*blocks), FlashOptions(), out_dtype=dtype)
    assert vmem_bytes(plan) / MIB == pytest.approx(mib, rel=0.05)
    assert vmem_limit(plan) >= mib * MIB

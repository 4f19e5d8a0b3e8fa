"""The flash kernel gives what dense float32 attention gives, for every kind of input."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from maxdiffusion.kernels.flash import Exponent, FixedM, FlashOptions, Gate
from maxdiffusion.kernels.tpu import BlockSizes
from tests.kernels.flash.cases import Case, error, expected, run, small_blocks, tolerance
from tests.marking import slow_except

WIDE = BlockSizes(
    block_q=256, block_kv=256, block_kv_compute=256, block_kv_compute_in=128, block_q_compute=128
)


def interpreted(**kw: object) -> FlashOptions:
    return FlashOptions(interpret=True, **kw)


CASES = {
    "ragged": Case(),
    "one query, one key": Case(q_len=1, kv_len=1, head_dim=32),
    "tiles inside blocks, lengths": Case(
        batch=2, dtype="bfloat16", q_len=300, kv_len=577, lengths=(577, 301), blocks=WIDE
    ),
    "a last block of one tile, lengths in the last keys": Case(
        batch=2, q_len=300, kv_len=400, lengths=(400, 390), blocks=WIDE
    ),
    "an odd tile in blocks, a last block without it": Case(
        q_len=450, kv_len=300, blocks=replace(WIDE, block_q=384, block_q_compute=256)
    ),
    "no keys in one row, grouped heads": Case(
        batch=2, heads=4, head_dim=64, q_len=77, lengths=(0, 130)
    ),
    "masks, head_dim 80": Case(batch=2, head_dim=80, masked=True),
    "masks and lengths, bfloat16": Case(
        batch=2, dtype="bfloat16", masked=True, lengths=(300, 200), heads=2, kv_heads=1
    ),
    "two heads per tile, head_dim 32": Case(heads=4, head_dim=32, blocks=small_blocks(2)),
    "tile of two key groups, natural": Case(
        heads=4, blocks=small_blocks(4), options=interpreted(exponent=Exponent.NATURAL)
    ),
    "fixed-m": Case(head_dim=64, options=interpreted(softmax=FixedM())),
    "fixed-m, lengths, bfloat16": Case(
        batch=2, dtype="bfloat16", lengths=(300, 131), options=interpreted(softmax=FixedM())
    ),
    "fixed-m, masks, natural": Case(
        batch=2,
        masked=True,
        head_dim=32,
        options=interpreted(softmax=FixedM(gate=Gate.FORCED), exponent=Exponent.NATURAL),
    ),
    "fixed-m, two heads per tile": Case(
        head_dim=32, blocks=small_blocks(2), options=interpreted(softmax=FixedM())
    ),
}


@pytest.mark.parametrize("name", slow_except(["ragged"], CASES))
def test_equals_dense_attention_and_itself(name: str) -> None:
    case = CASES[name]
    q, k, v = case.arrays()
    out = run(case, q, k, v)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert error(out, expected(case, q, k, v)) <= tolerance(case, q, k, v)
    assert jnp.array_equal(out, run(case, q, k, v))


def test_rows_without_keys_are_zero() -> None:
    case = CASES["no keys in one row, grouped heads"]
    assert not jnp.any(run(case, *case.arrays())[0])


def test_hidden_keys_and_values_may_hold_anything() -> None:
    case = CASES["masks, head_dim 80"]
    q, k, v = case.arrays()
    hidden = ~case.selection()["kv_mask"][:, :, None, None]
    poisoned = run(case, q, jnp.where(hidden, jnp.nan, k), jnp.where(hidden, jnp.inf, v))
    assert jnp.array_equal(poisoned, run(case, q, k, v))


@pytest.mark.parametrize("late", [30.0, 3e4])
@pytest.mark.parametrize("q_len", [200, 300])
def test_a_maximum_that_jumps_late_is_exact(late: float, q_len: int) -> None:
    """Keys that score far above all before them, past the headroom of the quick path.

    300 queries leave a last block with tiles that nobody asked for: taking a block back must not
    bring what was never kept.
    """
    case = Case(q_len=q_len, kv_len=512, head_dim=32, blocks=WIDE)
    q, k, v = case.arrays()
    towards = q.mean(axis=1, keepdims=True)
    k = k.at[:, 300:310].set(late * towards / jnp.linalg.norm(towards, axis=-1, keepdims=True))
    out = run(case, q, k, v)
    assert error(out, expected(case, q, k, v)) <= tolerance(case, q, k, v)


RACES = {
    "ragged": Case(q_len=130, kv_len=257, heads=1, kv_heads=1),
    "several tiles a block, bfloat16": Case(
        q_len=200, kv_len=300, heads=1, kv_heads=1, dtype="bfloat16", blocks=WIDE
    ),
    "lengths in the last keys": Case(
        batch=2, q_len=130, heads=1, kv_heads=1, kv_len=300, lengths=(300, 290), blocks=WIDE
    ),
    "masks": Case(batch=2, q_len=70, kv_len=200, heads=1, kv_heads=1, masked=True),
    "grouped heads, two a tile": Case(q_len=70, kv_len=200, kv_heads=1, blocks=small_blocks(2)),
    "fixed-m, lengths": Case(
        batch=2,
        q_len=70,
        heads=1,
        kv_heads=1,
        lengths=(300, 131),
        options=interpreted(softmax=FixedM()),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RACES)
def test_the_tpu_interpreter_finds_no_race_and_no_stray_read(name: str) -> None:
    """Memory outside the arrays reads as NaN there, and DMAs finish as late as they may."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    case = RACES[name]
    case = replace(case, options=replace(case.options, interpret=params))
    q, k, v = case.arrays()
    out = jax.block_until_ready(run(case, q, k, v))
    assert error(out, expected(case, q, k, v)) <= tolerance(case, q, k, v)
    assert not interpret_pallas_call.races.races_found

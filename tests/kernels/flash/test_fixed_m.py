"""Fixed-m: the bound holds, the gate keeps what would be lost, and nothing ever is not finite."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.kernels.flash import (
    Exponent,
    FixedM,
    FlashOptions,
    Gate,
    KeyNorms,
    Keys,
    fixed_m_bounds,
    gate_heads,
    key_norms,
    key_total,
    query_norm,
    smooth_keys,
)
from maxdiffusion.kernels.flash.fixed_m import (
    CEILING_BITS,
    KEYS_BITS,
    VALUES_HIGH_BITS,
    gate_bits,
)
from tests.kernels.flash.cases import Case, error, expected, run, tolerance

MEASURED = FlashOptions(interpret=True, softmax=FixedM())


def adversaries() -> dict[str, tuple]:
    """Returns q, k, v that break a careless bound; all fit one compiled kernel."""
    q, k, v = Case(head_dim=32, options=MEASURED).arrays()
    sink = k.at[:, 7].set(60 * q[:, 0])
    return {
        "huge norms": (q * 1e12, k * 1e12, v),
        "norms past float32": (q * 1e18, k, v),
        "one sink key": (q, sink, v),
        "all equal": (jnp.full_like(q, 9.0), jnp.full_like(k, 9.0), v),
        "opposite": (q, -100 * jnp.broadcast_to(q[:, :1], k.shape), v),
        "huge values": (q, k, v * 1e30),
        "tiny values": (q, k, v * 1e-30),
        "zero queries": (q * 0, k * 1e20, v),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", adversaries())
def test_adversaries_stay_finite_and_exact(name: str) -> None:
    case = Case(head_dim=32, options=MEASURED)
    q, k, v = adversaries()[name]
    out = run(case, q, k, v)
    # An average of values is no larger than the largest (rounding apart), and never NaN.
    assert float(jnp.max(jnp.abs(out))) <= float(jnp.max(jnp.abs(v))) * (1 + 300 * 2.0**-24)
    assert error(out, expected(case, q, k, v)) <= tolerance(case, q, k, v)


@pytest.mark.slow
def test_a_single_attended_key_gives_its_value() -> None:
    case = Case(batch=2, head_dim=32, lengths=(1, 1), options=MEASURED)
    q, k, v = case.arrays()
    out = run(case, q, k, v)
    wanted = jnp.broadcast_to(v[:, :1], q.shape)
    assert error(out, wanted) <= tolerance(case, q, k, v)


def test_gate_lets_mild_heads_through_and_keeps_outliers() -> None:
    q, k, v = Case().arrays()
    k = smooth_keys(k.at[:, 5, 1].mul(100.0))
    bounds = fixed_m_bounds(q, k, v)
    assert bounds.fixed.tolist() == [[True, False]]
    forced = fixed_m_bounds(q, k, v, gate=Gate.FORCED)
    assert bool(jnp.all(forced.fixed))


def test_gate_weighs_values_and_raw_keys() -> None:
    limit = gate_bits("float32", Keys.SMOOTHED) / 1.02
    one = jnp.ones((1, 1))

    def passes(query: float, value: float, keys: Keys, exponent: Exponent) -> bool:
        norms = KeyNorms(key=one, value=value * one)
        options = {"dtype": "float32", "gate": Gate.MEASURED, "keys": keys, "exponent": exponent}
        return bool(gate_heads(query * one, norms, **options).fixed[0, 0])

    base_2 = Exponent.BASE_2
    assert passes(limit, 1.0, Keys.SMOOTHED, base_2)
    assert not passes(limit * 1.03, 1.0, Keys.SMOOTHED, base_2)
    assert not passes(limit, 1.0, Keys.RAW, base_2)
    assert passes(limit / 2.1, 1.0, Keys.RAW, base_2)
    assert not passes(limit, 2.0**20, Keys.SMOOTHED, base_2)
    assert not passes(limit, 2.0**-9, Keys.SMOOTHED, base_2)
    assert passes(limit, 0.0, Keys.SMOOTHED, base_2)
    # e**x overflows at a smaller x than 2**x.
    assert not passes(limit, 1.0, Keys.SMOOTHED, Exponent.NATURAL)
    assert passes(limit * np.log(2), 1.0, Keys.SMOOTHED, Exponent.NATURAL)


def test_constants_leave_no_overflow() -> None:
    assert CEILING_BITS + KEYS_BITS + VALUES_HIGH_BITS <= 127
    for dtype in ("bfloat16", "float32"):
        assert 2 * gate_bits(dtype, Keys.RAW) <= CEILING_BITS + 126


@pytest.mark.slow
def test_smoothing_takes_the_mean_over_attended_keys_of_all_shards() -> None:
    _, k, _ = Case(batch=2).arrays()
    attended = jnp.arange(k.shape[1])[None] < jnp.array([[300], [130]])
    # What is not attended must not matter, even if it is not a number.
    k = jnp.where(attended[:, :, None, None], k, jnp.nan)
    wanted = np.asarray(k)[1] - np.mean(np.asarray(k)[1, :130].astype(np.float64), axis=0)
    smooth = smooth_keys(k, attended)
    np.testing.assert_allclose(smooth[1, :130], wanted[:130], rtol=0, atol=1e-6)
    halves = [key_total(k[:, s], attended[:, s]) for s in (slice(150), slice(150, None))]
    total = type(halves[0])(*(a + b for a, b in zip(*halves, strict=True)))
    both = smooth_keys(k, mean=total.mean())
    np.testing.assert_allclose(both[1, :130], wanted[:130], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_norms_look_at_attended_keys_only() -> None:
    q, k, v = Case(batch=2, heads=4).arrays()
    attended = jnp.arange(k.shape[1])[None] < jnp.array([[300], [130]])
    norms = key_norms(k.at[1, 130:].set(1e6), v.at[1, 130:].set(1e6), attended)
    wanted = np.linalg.norm(np.asarray(k)[1, :130], axis=-1).max(axis=0)
    np.testing.assert_allclose(norms.key[1], wanted, rtol=1e-6)
    assert float(jnp.max(norms.value)) < 10
    query = query_norm(q)
    assert query.shape == (2, 4)
    options = {"dtype": "float32", "gate": Gate.MEASURED, "keys": Keys.RAW}
    bounds = gate_heads(query, norms, exponent=Exponent.BASE_2, **options)
    np.testing.assert_array_equal(bounds.key_norm, np.repeat(norms.key, 2, axis=1))

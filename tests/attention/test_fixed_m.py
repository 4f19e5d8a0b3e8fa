"""Fixed-m softmax across devices: adversarial queries and keys, the gate, and its report."""

import functools

import jax
import numpy as np
import pytest

from maxdiffusion.attention import AttentionOptions, plan_attention
from tests.attention.cases import (
    Case,
    Inputs,
    allowed_error,
    compiled,
    inputs_of,
    mesh_of,
    placed,
    relative_error,
)

pytestmark = pytest.mark.slow

NAMES = ("ulysses_custom_fixed_m", "ulysses_ring_custom_fixed_m")
CASE = Case(label="adversarial", mesh=(1, 1, 2, 2, 1), length=45, heads=4, masked=True)


def ordinary() -> Inputs:
    return inputs_of(CASE)


def huge_norms() -> Inputs:
    """Scores of thousands: no bound can hold, every head must run online."""
    base = ordinary()
    return Inputs(q=base.q * 60, k=base.k * 60, v=base.v, mask=base.mask)


def one_sink_key() -> Inputs:
    """One key far longer than the others sets the bound of all, in one head."""
    base = ordinary()
    k = base.k.copy()
    k[:, 0, 1] *= 200
    return Inputs(q=base.q, k=k, v=base.v, mask=base.mask)


def all_equal() -> Inputs:
    """Without their mean all keys are zero: every score is equal."""
    base = ordinary()
    return Inputs(
        q=base.q, k=np.broadcast_to(base.k[:, :1], base.k.shape), v=base.v, mask=base.mask
    )


def shared_offset() -> Inputs:
    """Keys with a large common part pass the gate only because their mean is taken away."""
    base = ordinary()
    return Inputs(q=base.q, k=base.k + 12, v=base.v, mask=base.mask)


def a_single_valid_key() -> Inputs:
    """Softmax over one key, which the last device holds."""
    base = ordinary()
    mask = np.zeros_like(base.mask)
    mask[:, 41] = True
    return Inputs(q=base.q, k=base.k, v=base.v, mask=mask)


FAST = {
    ordinary: CASE.heads,
    huge_norms: 0,
    one_sink_key: CASE.heads - 1,
    all_equal: CASE.heads,
    shared_offset: CASE.heads,
    a_single_valid_key: CASE.heads,
}


@functools.cache
def program(name: str):
    """One plan and its compiled program, for inputs of every kind."""
    plan = plan_attention(name, CASE.problem, mesh_of(CASE.mesh))
    return plan, compiled(plan, placed(plan, ordinary(), padded=True))


def exact_score_error(inputs: Inputs) -> float:
    """How far float32 scores of this size may be off, as a factor on a probability."""
    norms = [np.linalg.norm(x, axis=-1).max() for x in (inputs.q, inputs.k)]
    return float(norms[0] * norms[1] * CASE.problem.scale * CASE.head_dim**0.5 * 2.0**-24)


@pytest.mark.slow
@pytest.mark.parametrize("make", FAST, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_adversarial_inputs_stay_finite_and_right(name, make):
    plan, run = program(name)
    inputs = make()
    got = np.asarray(run(*placed(plan, inputs, padded=True)))[:, : CASE.length]
    assert np.all(np.isfinite(got))
    # The dense reference has the scores' own rounding error as well: once more the same.
    bound = allowed_error(CASE, inputs, fixed_m=True) + 2 * exact_score_error(inputs)
    assert relative_error(got, inputs.expected(CASE.problem.scale)) <= bound


@pytest.mark.parametrize("make", FAST, ids=lambda make: make.__name__)
def test_reports_how_many_heads_took_the_fast_path(make):
    plan, _ = program(NAMES[1])
    arrays = placed(plan, make(), padded=True)
    with jax.set_mesh(plan.mesh):
        assert int(jax.jit(plan.fixed_m_eligible_heads)(*arrays)) == FAST[make]


def test_no_head_is_fast_without_fixed_m():
    plan = plan_attention("ulysses_custom", CASE.problem, mesh_of(CASE.mesh))
    arrays = placed(plan, ordinary(), padded=True)
    assert int(plan.fixed_m_eligible_heads(*arrays)) == 0


def test_masks_that_leave_nothing_give_zeros():
    plan, run = program(NAMES[1])
    base = ordinary()
    empty = Inputs(q=base.q, k=base.k, v=base.v, mask=np.zeros_like(base.mask))
    got = np.asarray(run(*placed(plan, empty, padded=True)))[:, : CASE.length]
    assert not np.any(got)


@functools.cache
def forced():
    """A plan whose gate lets every head through, and its compiled program."""
    options = AttentionOptions(fixed_m_gate="forced")
    plan = plan_attention(NAMES[1], CASE.problem, mesh_of(CASE.mesh), options)
    return plan, compiled(plan, placed(plan, ordinary(), padded=True))


def test_a_forced_gate_is_said_and_lets_every_head_through():
    plan, _ = forced()
    assert "fixed-m for every head: the gate is forced" in plan.describe()
    with jax.set_mesh(plan.mesh):
        arrays = placed(plan, huge_norms(), padded=True)
        assert int(jax.jit(plan.fixed_m_eligible_heads)(*arrays)) == CASE.heads


def test_forced_heads_that_the_gate_lets_through_are_right():
    plan, run = forced()
    inputs = ordinary()
    got = np.asarray(run(*placed(plan, inputs, padded=True)))[:, : CASE.length]
    bound = allowed_error(CASE, inputs, fixed_m=True)
    assert relative_error(got, inputs.expected(CASE.problem.scale)) <= bound


@pytest.mark.parametrize("make", [huge_norms, one_sink_key], ids=lambda make: make.__name__)
def test_forced_heads_that_the_gate_keeps_out_are_finite_and_wrong(make):
    """That they are wrong is why the gate exists; finite they are in any case."""
    plan, run = forced()
    inputs = make()
    got = np.asarray(run(*placed(plan, inputs, padded=True)))[:, : CASE.length]
    assert np.all(np.isfinite(got))
    bound = allowed_error(CASE, inputs, fixed_m=True) + 2 * exact_score_error(inputs)
    assert relative_error(got, inputs.expected(CASE.problem.scale)) > bound

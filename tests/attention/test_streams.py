"""What travels on a ring, and in which order: read from the traced program, nothing is compiled."""

from collections.abc import Iterator

import jax
import pytest
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from maxdiffusion.attention import AttentionPlan, plan_attention
from tests.attention.cases import Case, inputs_of, mesh_of, placed

DEGREE = 4
CASE = Case(label="streams", mesh=(1, 1, DEGREE, 1, 1), length=32, heads=2)


def operations(name: str) -> list[tuple[str, dict]]:
    """The primitives of an attention's program."""
    return operations_of(plan_attention(name, CASE.problem, mesh_of(CASE.mesh)), CASE)


def operations_of(plan: AttentionPlan, case: Case) -> list[tuple[str, dict]]:
    """The primitives of a plan's program."""
    arrays = placed(plan, inputs_of(case), padded=True)
    with jax.set_mesh(plan.mesh):
        return primitives(jax.make_jaxpr(plan)(*arrays).jaxpr)


def primitives(jaxpr: Jaxpr) -> list[tuple[str, dict]]:
    """Every primitive of a program with its parameters."""
    return [(equation.primitive.name, equation.params) for equation in equations(jaxpr)]


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation of a program, in order, however deep."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(equation.params):
                yield from equations(inner)


def hops(found: list[tuple[str, dict]]) -> list[tuple[tuple[int, int], ...]]:
    return [tuple(map(tuple, params["perm"])) for name, params in found if name == "ppermute"]


@pytest.fixture(scope="module")
def both_ways() -> list[tuple[str, dict]]:
    return operations("ulysses_ring_custom_bidir")


def test_two_streams_send_nothing_across_the_wrap_around(both_ways):
    moved = hops(both_ways)
    assert len(moved) == 2 * 2 * (DEGREE - 1)
    assert all(abs(source - target) == 1 for hop in moved for source, target in hop)


def test_two_streams_send_only_what_is_still_needed(both_ways):
    # Every device gets k and v of every other one exactly once.
    assert sum(map(len, hops(both_ways))) == 2 * DEGREE * (DEGREE - 1)


def test_two_streams_run_a_kernel_only_where_keys_arrived(both_ways):
    conditions = [params for name, params in both_ways if name == "cond"]
    kernels = [name for name, _ in both_ways if name == "pallas_call"]
    # The own keys without a question, and one question for each stream and hop.
    assert len(conditions) >= 2 * (DEGREE - 1)
    assert len(kernels) == 1 + 2 * (DEGREE - 1)


def test_a_ring_sends_before_it_computes_and_not_after_its_last_kernel():
    order = [name for name, _ in operations("tokamax_ring_custom")]
    order = [name for name in order if name in ("ppermute", "pallas_call")]
    turn = ["ppermute", "ppermute", "pallas_call"]
    assert order == turn * (DEGREE - 1) + ["pallas_call"]


def test_rings_next_to_each_other_turn_opposite_ways():
    """The devices of a chip differ along ulysses: each link carries one shard each way."""
    case = Case(label="4x2", mesh=(1, 1, DEGREE, 2, 1), length=32, heads=2)
    plan = plan_attention("ulysses_ring_custom", case.problem, mesh_of(case.mesh))
    up = {(2 * device, 2 * ((device + 1) % DEGREE)) for device in range(DEGREE)}
    down = {(2 * device + 1, 2 * ((device - 1) % DEGREE) + 1) for device in range(DEGREE)}
    moved = hops(operations_of(plan, case))
    assert len(moved) == 2 * (DEGREE - 1)
    assert all(set(hop) == up | down for hop in moved)
    assert "both ways round" in plan.describe()

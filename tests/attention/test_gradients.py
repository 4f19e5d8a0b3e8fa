"""Gradients of every name against float64, and what their backward passes send and keep."""

import functools
import zlib
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_policies
from jax.extend.core import Var, jaxprs_in_params
from jax.sharding import NamedSharding

from maxdiffusion.attention import ATTENTION_NAMES, plan_attention, plan_cross_attention
from maxdiffusion.attention.backends.base import ATTENTION_LOG_SUM, ATTENTION_OUT
from maxdiffusion.attention.registry import ATTENTION_OPS, differentiable_names
from maxdiffusion.costs.chips import CHIPS
from maxdiffusion.preflight.readers.collectives import find_collectives
from maxdiffusion.preflight.readers.hlo import read_program
from tests.attention.cases import QUICK, Case, allowed_error, inputs_of, mesh_of, placed
from tests.attention.collectives import counted, stated
from tests.attention.test_overlapped_ulysses import paired
from tests.attention.test_streams import equations, hops, primitives
from tests.marking import slow_except

# Two names of the same scheme and backend are one.
NAMES = [name for name in differentiable_names() if name not in ("cudnn_flash_te", "tokamax_ring")]
QUICK_NAMES = ("dot_product", "ulysses_ring_custom")
FORWARD_ONLY = [name for name in ATTENTION_NAMES if not ATTENTION_OPS[name].differentiable]
BFLOAT16 = ("ring", "ulysses_custom")
# The others have data over two devices.
MESHES = {"ulysses_ring_custom_bidir": (1, 1, 4, 2, 1), "ulysses_ring": (1, 1, 4, 2, 1)}


def drawn_case(name: str) -> tuple[Case, int, float]:
    """A problem of its own for each name, its number of key heads, and the size of its queries."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    heads = int(rng.choice([4, 6]))
    case = Case(
        label=name,
        mesh=MESHES.get(name, (2, 1, 2, 2, 1)),
        batch=2,
        length=int(rng.integers(33, 62)),
        heads=heads,
        head_dim=int(rng.choice([16, 32])),
        dtype="bfloat16" if name in BFLOAT16 else "float32",
        masked=True,
    )
    return case, int(rng.choice([heads // 2, heads])), float(10 ** rng.uniform(-0.5, 0.5))


class Exact(NamedTuple):
    """The gradients of q, k, v in float64, the sums of their terms' sizes, and their deviations.

    Deviations are those of the errors in bfloat16, in units of the deviation of one rounding.
    """

    gradients: tuple[np.ndarray, ...]
    sizes: tuple[np.ndarray, ...]
    deviations: tuple[np.ndarray, ...]


def exact_gradients(inputs, weights, scale):
    """The exact gradients of sum(weights * attention), and what roundings do to them.

    In bfloat16 these are rounded, each by itself: queries when they are scaled (which moves a score
    by a sum over head features, and its mean over keys too), the gradient of the output, the
    output, p and ds before the last products, and the gradients, twice where devices sum them.
    """
    q, k, v, d_out = (x.astype(np.float64) for x in (inputs.q, inputs.k, inputs.v, weights))
    repeats = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, repeats, axis=2) for x in (k, v))
    s = np.einsum("bsnh,btnh->bnst", q, k) * scale
    if inputs.mask is not None:
        s = np.where(inputs.mask[:, None, None], s, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    out = np.einsum("bnst,btnh->bsnh", p, v)
    rows, pairs = "bsnh,bsnh->bns", "bsnh,btnh->bnst"

    def by_key_head(x):
        return x.reshape(*x.shape[:2], -1, repeats, x.shape[3]).sum(axis=3)

    def products(d_s, p, q, k, d_out):
        d_k, d_v = np.einsum("bnst,bsnh->btnh", d_s, q), np.einsum("bnst,bsnh->btnh", p, d_out)
        return np.einsum("bnst,btnh->bsnh", d_s, k), by_key_head(d_k), by_key_head(d_v)

    def score_gradients(v, d_out, out, sign):
        delta = np.einsum(rows, out, d_out)[..., None]
        return p * (np.einsum(pairs, d_out, v) + sign * delta) * scale

    d_s = score_gradients(v, d_out, out, -1)
    gradients = products(d_s, p, q, k, d_out)
    sizes = [np.abs(x) for x in (q, k, v, d_out, out)]
    sizes = products(score_gradients(*sizes[2:], 1), p, *sizes[:2], sizes[3])
    q2, k2, v2, d_out2, out2 = (np.square(x) for x in (q, k, v, d_out, out))
    of_score = 2 * np.einsum(pairs, q2, k2) * scale**2
    of_d_p = np.einsum(pairs, d_out2, v2) + 2 * np.einsum(rows, out2, d_out2)[..., None]
    of_p, of_d_s = p**2 * (2 + of_score), d_s**2 * (2 + of_score) + p**2 * of_d_p * scale**2
    variances = products(of_d_s, of_p, q2, k2, d_out2)
    terms = products(d_s**2, p**2, q2, k2, d_out2)
    deviations = [
        np.sqrt(variance + 2 * (gradient**2 + term))
        for variance, gradient, term in zip(variances, gradients, terms, strict=True)
    ]
    return Exact(gradients, sizes, tuple(deviations))


def program_of(plan, arrays, mask, weights):
    """The compiled output and the gradients of q, k and v of its weighted sum."""

    def program(q, k, v, weights):
        out, pull_back = jax.vjp(lambda *qkv: plan(*qkv, mask), q, k, v)
        return out, pull_back(weights.astype(out.dtype))

    with jax.set_mesh(plan.mesh):
        return jax.jit(program).lower(*arrays, weights).compile(compiler_options=QUICK)


DEVIATION = 2.0**-8 / 3**0.5
"""Of the relative error of a rounding to bfloat16, at most: spread evenly over half a spacing."""
SHARED = 2.0
"""Some errors are those of several terms (of a query, of a sum), which a random walk forgets."""
MARGIN = 25
"""Zeros are this many times farther from a gradient than its errors may take it."""


def check(plan, case, inputs):
    """Compares the gradients of a plan with the exact ones, and its collectives with the stated.

    In float32 p carries the forward's relative error, ds that of p, of the output in delta and of a
    sum over head features, and the last product adds that of a sum over tokens: three times the
    forward's error, of the sum of the sizes of all terms.
    """
    weights = np.random.default_rng(1).standard_normal(inputs.q.shape).astype(np.float32)
    padding = ((0, 0), (0, plan.padded_q_len - case.length), (0, 0), (0, 0))
    where = NamedSharding(plan.mesh, plan.problem.q_spec)
    *arrays, mask = placed(plan, inputs, padded=True)
    padded = jax.device_put(np.pad(weights, padding), where)
    program = program_of(plan, arrays, mask, padded)
    _, gradients = program(*arrays, padded)
    exact = exact_gradients(inputs, weights, case.problem.scale)
    single = 3 * allowed_error(replace(case, dtype="float32"), inputs, fixed_m=plan.fixed_m)
    for got, wanted, size, deviation in zip(gradients, *exact, strict=True):
        bound = single * np.linalg.norm(size)
        if case.dtype == "bfloat16":
            bound += SHARED * DEVIATION * np.linalg.norm(deviation)
        error = np.asarray(got, np.float64)[:, : wanted.shape[1]] - wanted
        assert np.linalg.norm(error) <= bound
        assert np.linalg.norm(wanted) > MARGIN * bound
    return program


def check_collectives(plan, program):
    both = (*plan.collectives, *plan.backward_collectives)
    assert counted(program.as_text()) == stated(both)
    if plan.problem.dtype.name == "bfloat16":
        return  # which XLA for CPU sends as float32
    expected: Counter = Counter()
    for collective in both:
        expected[collective.kind, collective.axes] += collective.bytes
    sent = sent_bytes(program, plan.mesh)
    for place in [place for place in expected if plan.fixed_m and place[0] == "all-reduce"]:
        # A few bytes per head; the number of keys is one for all heads of a batch row.
        assert 0.9 * expected[place] <= sent.pop(place) <= expected.pop(place)
    assert sent == dict(expected)


def sent_bytes(program, mesh):
    """Bytes that the busiest device sends in a compiled program, by kind and axes."""
    totals: dict = {}
    for one in find_collectives(read_program(program.as_text()), mesh.shape, CHIPS["tpu7x"]):
        senders = [pair[0] for pair in one.pairs] or range(mesh.size)
        by_device = totals.setdefault((one.kind, one.axes), np.zeros(mesh.size, int))
        np.add.at(by_device, np.array(senders), one.sent)
    return {place: int(sums.max()) for place, sums in totals.items()}


@pytest.mark.parametrize("name", slow_except(QUICK_NAMES, NAMES))
def test_gradients_equal_those_in_float64_with_the_stated_collectives(name):
    case, kv_heads, size = drawn_case(name)
    problem = replace(case.problem, kv_heads=kv_heads)
    plan = plan_attention(name, problem, mesh_of(case.mesh))
    inputs = inputs_of(case)
    q = (inputs.q.astype(np.float32) * size).astype(inputs.q.dtype)
    inputs = replace(inputs, q=q, k=inputs.k[:, :, :kv_heads], v=inputs.v[:, :, :kv_heads])
    check_collectives(plan, check(plan, case, inputs))


PAIRED = Case(label="2x2", mesh=(1, 1, 2, 2, 1), length=40, heads=4, masked=True)


def paired_plan():
    return paired(plan_attention("ulysses_ring_custom", PAIRED.problem, mesh_of(PAIRED.mesh)))


@pytest.mark.slow
def test_gradients_of_overlapped_queries_equal_those_in_float64():
    plan = paired_plan()
    check_collectives(plan, check(plan, PAIRED, inputs_of(PAIRED)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dot_product", "ring", "ulysses_custom_fixed_m"])
def test_gradients_of_a_replicated_text_are_summed_over_its_copies(name):
    case = Case(label="text", mesh=(2, 1, 2, 2, 1), batch=2, length=30, heads=4, masked=True)
    plan = plan_cross_attention(name, replace(case.problem, kv_len=11), mesh_of(case.mesh))
    whole = inputs_of(case)
    inputs = replace(whole, k=whole.k[:, :11], v=whole.v[:, :11], mask=whole.mask[:, :11])
    check_collectives(plan, check(plan, case, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring", "tokamax_ring_custom"])
def test_a_batch_row_without_keys_has_no_gradient(name):
    case = Case(label="no keys", mesh=(1, 1, 2, 1, 1), batch=2, length=16, heads=1, head_dim=16)
    plan = plan_attention(name, case.problem, mesh_of(case.mesh))
    *arrays, _ = placed(plan, inputs_of(case), padded=True)
    mask = jnp.array([[True] * 16, [False] * 16])
    _, gradients = program_of(plan, arrays, mask, arrays[0])(*arrays, arrays[0])
    for gradient in map(np.asarray, gradients):
        assert np.isfinite(gradient).all()
        assert gradient[0].any()
        assert not gradient[1].any()


def gradient_of(plan, case, wrap=lambda function: function):
    """The traced gradient of a plan."""
    *arrays, mask = placed(plan, inputs_of(case), padded=True)

    def loss(q, k, v):
        return jnp.sum(wrap(lambda *qkv: plan(*qkv, mask))(q, k, v) ** 2)

    with jax.set_mesh(plan.mesh):
        return jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*arrays).jaxpr


def used_kernels(jaxpr):
    """Returns how many kernels have a result that is used; XLA drops the others, jax does not."""
    used, count = {var for var in jaxpr.outvars if isinstance(var, Var)}, 0
    for equation in reversed(jaxpr.eqns):
        if not used.intersection(equation.outvars):
            continue
        kernel = equation.primitive.name == "pallas_call"
        inner = [] if kernel else jaxprs_in_params(equation.params)
        count += kernel + sum(map(used_kernels, inner))
        used |= {var for var in equation.invars if isinstance(var, Var)}
    return count


RING = Case(label="ring of 4", mesh=(1, 1, 4, 1, 1), length=32, heads=2)


def test_a_backward_ring_sends_queries_before_it_computes():
    case = replace(RING, dtype="bfloat16")
    plan = plan_attention("ring", case.problem, mesh_of(case.mesh))
    order = [
        "kernel" if equation.primitive.name == "pallas_call" else str(equation.invars[0].aval.dtype)
        for equation in equations(gradient_of(plan, case))
        if equation.primitive.name in ("ppermute", "pallas_call")
    ]
    keys, queries = ["bfloat16", "bfloat16"], ["bfloat16", "bfloat16", "float32"]
    forward = [*keys, "kernel"] * 3 + ["kernel"]
    first, gradient = [*queries, "kernel"], ["kernel", "float32"]
    assert order == forward + first + 2 * (queries + gradient) + gradient


def test_a_backward_line_sends_over_at_most_two_links():
    plan = plan_attention("ulysses_ring_custom_bidir", RING.problem, mesh_of(RING.mesh))
    backward = hops(primitives(gradient_of(plan, RING)))[2 * 2 * 3 :]
    assert len(backward) == 4 * 3
    for hop in backward:
        up = Counter(link for a, b in hop for link in range(a, b))
        down = Counter(link for a, b in hop for link in range(b, a))
        assert {*up.values(), *down.values()} == {1}
        assert len(hop) == 4


SAVED = checkpoint_policies.save_only_these_names(ATTENTION_OUT, ATTENTION_LOG_SUM)
NOTHING = checkpoint_policies.nothing_saveable


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dot_product"])
def test_kept_outputs_and_log_sums_spare_every_forward_kernel(name):
    plan = plan_attention(name, RING.problem, mesh_of((1, 1, 2, 2, 1)))

    def under(policy):
        wrap = functools.partial(jax.checkpoint, policy=policy)
        return used_kernels(gradient_of(plan, RING, wrap))

    assert under(SAVED) == used_kernels(gradient_of(plan, RING)) < under(NOTHING)


@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_refuses_gradients_that_it_does_not_have(name):
    plan = plan_attention(name, RING.problem, mesh_of(RING.mesh))
    with pytest.raises(NotImplementedError, match="no gradient"):
        gradient_of(plan, RING)

"""Shardings and memories of a training state: bytes on a device, and equal losses."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals
from jax.sharding import NamedSharding, PartitionSpec

from maxdiffusion.models.wan.layers import FLOAT32, Linear
from maxdiffusion.training.loss import (
    ExpertSchedule,
    NoiseLevels,
    Remat,
    RematPolicy,
    TrainedExperts,
)
from maxdiffusion.training.memory.moments import MomentsFormat
from maxdiffusion.training.memory.placement import (
    DEVICE,
    HOST,
    StatePlacement,
    bytes_on_device,
    in_memory,
    spread_over,
    state_shardings,
    with_scattered_gradients,
)
from maxdiffusion.training.step import Placed, first_state, first_state_of_each, make_step
from maxdiffusion.training.wan import on_mesh
from tests.training.tiny_training import batch_of, drawn_values, mesh_of, optimiser, training


def state_of(run):
    values = {
        name: drawn_values(part, run.mesh, place)
        for place, (name, part) in enumerate(run.models.items())
    }
    settings = {"seed": 0, "mesh": run.mesh, "placement": run.placement}
    return first_state(values, run.optimiser, **settings)


def losses_of(run, experts, steps=2):
    state, losses = state_of(run), []
    programs = {name: run.step(name) for name in {*experts}}
    for number in range(steps):
        state, report = programs[experts[number]](state, batch_of(number))
        losses.append(float(report.loss))
    return losses, state


@pytest.mark.parametrize(
    ("spec", "shape", "wanted"),
    [
        ((), (16, 6), (("data", "ulysses"), None)),
        ((None, "fsdp"), (6, 16), (None, ("fsdp", "data", "ulysses"))),
        (("fsdp",), (2,), ("fsdp",)),
        ((None, ("data",)), (8, 8), (None, ("data", "ulysses"))),
        ((None, ("data",)), (8, 6), ("ulysses", "data")),
        (("tensor", "fsdp"), (8, 8), ("tensor", ("fsdp", "data", "ulysses"))),
    ],
)
def test_more_axes_go_where_they_divide(spec, shape, wanted):
    mesh = mesh_of(data=2, fsdp=2, ulysses=2)
    found = spread_over(NamedSharding(mesh, PartitionSpec(*spec)), shape)
    plain = PartitionSpec(*wanted)
    assert found.is_equivalent_to(NamedSharding(mesh, plain), len(shape))


def test_gradients_of_sharded_matrices_are_split_over_all_axes():
    mesh = mesh_of(data=2, fsdp=2, ulysses=2)
    linear = Linear((16, 8), ("model", "mlp"), FLOAT32, rngs=nnx.Rngs(0))
    graph, layer = nnx.split(linear)
    tokens = jnp.linspace(-1.0, 1.0, 8 * 16).reshape(8, 16)

    def step(x, inputs):
        return nnx.merge(graph, inputs[0])(x), None

    def loss(step):
        return jax.grad(lambda layer: jnp.sum(jnp.square(step(tokens, (layer,))[0])))

    plain = loss(step)(layer)
    with jax.set_mesh(mesh):
        found = jax.jit(loss(with_scattered_gradients(step, mesh)))(layer)
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(found[name][...], plain[name][...], rtol=1e-5)
    split = NamedSharding(mesh, PartitionSpec(("fsdp", "data", "ulysses")))
    assert found["kernel"][...].sharding.is_equivalent_to(split, 2)
    assert with_scattered_gradients(step, mesh_of()) is step


@pytest.fixture(scope="module")
def one_device():
    return losses_of(training(), ("transformer", "transformer"))


@pytest.mark.slow
def test_a_spread_optimizer_state_has_the_same_losses(one_device):
    mesh = mesh_of(data=2, fsdp=2, ulysses=2)
    spread = training(mesh=mesh, attention="dot_product", placement=StatePlacement(spread=True))
    losses, state = losses_of(spread, ("transformer", "transformer"))
    np.testing.assert_allclose(losses, one_device[0], rtol=2e-5)  # sums in another order
    whole = bytes_on_device(state.values["transformer"])
    held = bytes_on_device(state.moments["transformer"])
    # Two moments, each in a quarter (data x ulysses) but for small arrays that do not divide.
    assert 2 * whole / 4 <= held < 2 * whole / 3
    for path, moment in state.moments["transformer"][0].mu.items():
        placed = spread_over(state.values["transformer"][path].sharding, moment.shape)
        assert moment.sharding.is_equivalent_to(placed, moment.ndim)


def run_in_turn(placement, turns=("high", "low", "high")):
    """Losses and last state of two toy models that are trained in turn."""
    rule, mesh = optimiser(), mesh_of(data=2, ulysses=2)
    sharding = NamedSharding(mesh, PartitionSpec(None, "data"))
    values = {
        name: {"w": jax.device_put(jnp.linspace(-1.0, 1.0, 64).reshape(8, 8) + shift, sharding)}
        for shift, name in enumerate(("high", "low"))
    }
    settings = {"seed": 0, "mesh": mesh, "placement": placement}
    state = first_state_of_each(iter(values.items()), rule, **settings)
    placed = Placed(placement=placement, shardings={key: {"w": sharding} for key in values})

    def home(part):
        return state_shardings(part, part.values, mesh, placement)

    def program(name):
        def loss(values, batch, key):
            return jnp.mean(jnp.square(values[name]["w"] - batch[0, 0])), {}

        step = make_step(loss, rule, trained=(name,), placed=placed)
        return on_mesh(step, mesh, models=(name,), home=home if placement.parks else None)

    programs, losses = {name: program(name) for name in values}, []
    for name in turns:
        before = state
        state, report = programs[name](state, jnp.full((4, 1), 0.5))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.values[name]))
        losses.append(float(report.loss))
    return losses, state


@pytest.mark.parametrize("optimizer_memory", [DEVICE, HOST])
def test_experts_take_turns_on_the_device_bit_for_bit(optimizer_memory):
    usual, wanted = run_in_turn(StatePlacement(spread=True))
    placement = StatePlacement(idle_memory=HOST, optimizer_memory=optimizer_memory, spread=True)
    losses, state = run_in_turn(placement)
    assert losses == usual
    assert bytes_on_device(state.values["high"], HOST) == 0
    for kind in (state.values, state.ema, state.moments):
        assert bytes_on_device(kind["low"]) == 0
    assert bool(bytes_on_device(state.ema["high"], HOST)) == (optimizer_memory == HOST)
    assert bytes_on_device(state.ema["low"], HOST) == 8 * 8 * 4 // 4  # data x ulysses
    for name in ("high", "low"):
        found, held = (one.moments[name][0].nu["w"] for one in (state, wanted))
        np.testing.assert_array_equal(np.asarray(found), np.asarray(held))


def toy_losses(kept, steps=20):
    """Losses of a quadratic with one parameter."""
    rule = optimiser(moments=MomentsFormat(kept))
    start = {"toy": {"w": jnp.linspace(-1.0, 1.0, 128)}}
    state = first_state(start, rule, seed=0, mesh=mesh_of())

    def loss(values, batch, key):
        return jnp.mean(jnp.square(values["toy"]["w"] - batch)), {}

    step, losses = jax.jit(make_step(loss, rule, trained=("toy",))), []
    for _ in range(steps):
        state, report = step(state, jnp.float32(0.5))
        losses.append(float(report.loss))
    return losses, bytes_on_device(state.moments)


@pytest.mark.parametrize(("kept", "size"), [("bfloat16", 0.51), ("int8", 0.27)])
def test_rounded_moments_train_almost_alike(kept, size):
    exact, whole = toy_losses("float32")
    losses, held = toy_losses(kept)
    assert losses[:2] == exact[:2]  # moments are rounded after the first update
    assert losses[2:] != exact[2:]
    assert toy_losses(kept)[0] == losses
    # Adam divides two moments that are each off by at most a code of 127: 1.6 % of an update.
    assert losses[0] - losses[-1] == pytest.approx(exact[0] - exact[-1], rel=0.016)
    assert held < size * whole


def test_arrays_that_are_there_already_stay():
    array = jax.device_put(jnp.arange(4.0), NamedSharding(mesh_of(), PartitionSpec()))
    assert in_memory(array, DEVICE) is array
    moved = in_memory(array, HOST)
    assert moved.sharding.memory_kind == HOST
    np.testing.assert_array_equal(np.asarray(moved), np.arange(4.0))


def test_a_memory_that_devices_lack_is_refused():
    wanted = StatePlacement(optimizer_memory=HOST)
    wanted.check(mesh_of())
    (problem,) = wanted.missing(frozenset({DEVICE}), "toy")
    assert problem.name == "optimizer_state_memory"
    assert "toy" in problem.rule


def test_experts_have_their_share_of_turns():
    schedule = ExpertSchedule(
        levels=NoiseLevels(shift=3.0), boundary=0.875, trained=TrainedExperts.BOTH, turn=5
    )
    names = [schedule.at(step) for step in range(1000)]
    runs = [{*names[start : start + 5]} for start in range(0, 1000, 5)]
    assert all(len(run) == 1 for run in runs)
    share = NoiseLevels(shift=3.0).of_expert("transformer", 0.875).share
    assert names.count("transformer") == pytest.approx(1000 * share, abs=5)
    with pytest.raises(ValueError, match="turn=0"):
        replace(schedule, turn=0)


def test_attention_is_kept_and_nothing_else(capsys):
    """The policy keeps what carries the names of a kernel's residuals, and the inputs."""

    def layer(x, _):
        out = checkpoint_name(jnp.sin(x), "attention_out")
        log_sum = checkpoint_name(jnp.sum(jnp.sin(out), axis=2), "attention_log_sum")
        other = checkpoint_name(jnp.cos(x * log_sum[..., None]), "attn_output")
        return jnp.sin(other) * out, None

    kept = RematPolicy(kind=Remat.ATTENTION).wrap_block(layer)
    print_saved_residuals(lambda x: kept(x, None)[0].sum(), jnp.ones((1, 4, 3)))
    lines = capsys.readouterr().out.splitlines()
    named = [line for line in lines if "named" in line]
    assert sorted(re.findall(r"named '(\w+)'", " ".join(named))) == [
        "attention_log_sum",
        "attention_out",
    ]
    assert len(lines) == len([line for line in lines if "argument" in line]) + 2

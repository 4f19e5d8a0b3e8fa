"""Adapters are found by name, start as PEFT's do, and train the same on every mesh."""

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.config.load import load_config
from maxdiffusion.training.lora.adapters import LoraSettings, lora_settings
from maxdiffusion.training.step import first_state, joined
from tests.training.lora.test_base import CONFIG
from tests.training.tiny_training import (
    TRANSFORMER,
    batch_of,
    drawn_values,
    flat,
    mesh_of,
    training,
)

EXPERT = "transformer"
RTOL = 1e-5  # as for all weights: tests/training/test_step.py
LORA = LoraSettings(
    rank=3,
    alpha=6.0,
    names=("attn1.to_q", "attn2.to_k", "ffn.net.2"),
    modules=("blocks.attn1.to_q", "blocks.attn2.to_k", "blocks.ffn.down"),
)


def settings(*more):
    found = lora_settings(load_config([str(CONFIG), *more]), TRANSFORMER)
    assert found is not None
    return found


def test_modules_are_named_as_in_peft():
    both = settings("train_lora_modules=['to_q','attn2.to_out.0']")
    assert both.names == ("attn1.to_q", "attn2.to_q", "attn2.to_out.0")
    assert both.modules == ("blocks.attn1.to_q", "blocks.attn2.to_q", "blocks.attn2.to_out")
    wide = settings("train_lora_modules=['net.0.proj']", "train_lora_rank=8")
    assert wide.modules == ("blocks.ffn.up",)
    assert wide.scale == 1.0  # alpha is 8 in the file
    assert settings("train_lora_alpha=null").alpha == 4.0
    assert lora_settings(load_config([str(CONFIG), "train_lora=false"]), TRANSFORMER) is None


def test_only_the_named_linear_maps_have_room():
    run = training(lora=LORA, weights_dtype=jnp.dtype(jnp.bfloat16))
    values = flat(run.models[EXPERT].parameters)
    rooms = [path for path in values if "lora_" in path]
    assert len(rooms) == 2 * len(LORA.modules)


def test_the_first_adapters_change_nothing_and_are_drawn_evenly():
    run = training(lora=LORA)
    part = run.models[EXPERT]
    alone = LORA.first_values(part, seed=4, mesh=run.mesh)
    meshed = LORA.first_values(part, seed=4, mesh=mesh_of(data=2, fsdp=2, tensor=2))
    assert alone.keys() == {*LORA.paths}
    for path, value in alone.items():
        np.testing.assert_array_equal(value, meshed[path])
        values = np.asarray(value)
        if path.endswith("lora_up"):
            assert not values.any()
            continue
        bound = 1 / math.sqrt(values.shape[1])  # kaiming_uniform with a = sqrt(5)
        assert 0.9 * bound < np.abs(values).max() <= bound
        assert values.var() == pytest.approx(bound**2 / 3, rel=0.3)
    down = "blocks.ffn.down.lora_down"
    other = LORA.first_values(part, seed=5, mesh=run.mesh)
    assert (np.asarray(other[down]) != np.asarray(alone[down])).any()


def adapter_state(run):
    """Drawn weights, and adapters on them that change something."""
    drawn = {
        name: drawn_values(part, run.mesh, place)
        for place, (name, part) in enumerate(run.models.items())
    }
    adapters = {EXPERT: {path: drawn[EXPERT].pop(path) for path in LORA.paths}}
    return first_state(adapters, run.optimiser, seed=0, mesh=run.mesh), drawn


def trained(run, steps=2):
    state, frozen = adapter_state(run)
    step, losses = run.step(EXPERT, frozen), []
    for number in range(steps):
        state, report = step(state, batch_of(number))
        losses.append(float(report.loss))
    return losses, state, frozen


@pytest.mark.slow
def test_every_mesh_trains_the_same_adapters():
    run = training(lora=LORA)
    losses, state, frozen = trained(run)
    before = adapter_state(run)[1]
    for path, value in flat(before).items():
        np.testing.assert_array_equal(value, flat(frozen)[path], err_msg=path)
    assert {*state.values} == {*state.ema} == {*state.moments} == {EXPERT}
    meshed = training(lora=LORA, mesh=mesh_of(data=2, fsdp=2, tensor=2))
    others, there, weights = trained(meshed)
    np.testing.assert_allclose(others, losses, rtol=RTOL)
    for path, value in flat(there.values).items():
        # Adam divides a gradient by its size: what differs in its last bits may differ in sign.
        changed = np.abs(value - flat(state.values)[path])
        assert np.quantile(changed, 0.95) < 1e-4, path
    kernel = weights[EXPERT]["blocks.ffn.up.kernel"]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size


def test_frozen_weights_and_adapters_are_one_model():
    run = training(lora=LORA)
    state, frozen = adapter_state(run)
    whole = joined(frozen, state.values)
    assert {*whole} == {*run.models}
    assert len(whole[EXPERT]) == len(flat(run.models[EXPERT].parameters))
    scaled = LORA.scaled(whole[EXPERT])
    for path, value in whole[EXPERT].items():
        factor = 2.0 if path.endswith("lora_up") else 1.0
        np.testing.assert_array_equal(scaled[path], factor * np.asarray(value))


def test_a_step_of_adapters_costs_two_forward_passes():
    with pytest.raises(ValueError, match="must be above 0"):
        replace(LORA, alpha=0.0)
    assert training(lora=LORA).backward == 1
    assert training().backward == 2

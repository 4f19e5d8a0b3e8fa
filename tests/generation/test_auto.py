"""`auto` becomes an attention with its split, and a sharding of weights."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import jax
import pytest

from maxdiffusion.config.load import read_config
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.generation.job import plan_job
from maxdiffusion.preflight.command import find_spec
from tests.described_tpus import Core

CONFIG = str(Path(__file__).parents[2] / "configs/base_wan_27b.yml")


CORES = [
    Core(coords=(x, y, 0), core_on_chip=core)
    for x, y, core in product(range(2), range(2), range(2))
]


def planned(*overrides, devices=CORES):
    parsed = read_config([CONFIG, "attention=auto", *overrides])
    spec = find_spec(parsed.config.pretrained_model_name_or_path)
    return plan_job(parsed, spec, devices)


def test_a_slice_gets_its_quickest_attention():
    job = planned("ici_data_parallelism=2")
    assert job.choices.attention == "ulysses_ring_custom"
    assert (job.choices.mesh.shape.ulysses, job.choices.mesh.shape.ring) == (2, 2)
    assert job.attention.self_attention.name == "ulysses_ring_custom"
    assert dict(job.builder.mesh.shape)["ulysses"] == 2
    assert job.notes[0].startswith("attention auto: ulysses_ring_custom with ulysses 2 x ring 2")


def test_the_config_stays_as_it_was_read():
    job = planned("ici_data_parallelism=2")
    assert (job.config.attention, job.config.weight_placement) == ("auto", "auto")
    fields = job.choices.fields_of(job.config)
    chosen = (fields["attention"], fields["ulysses_shards"], fields["weight_placement"])
    assert chosen == ("ulysses_ring_custom", 2, "replicate")


@pytest.mark.parametrize("override", ["ulysses_shards=4", "ici_ring_parallelism=1"])
def test_a_stated_split_is_kept(override):
    choices = planned("ici_data_parallelism=2", override).choices
    assert (choices.attention, choices.mesh.shape.ulysses) == ("ulysses_ring_custom", 4)


def test_another_attention_is_left_alone():
    job = planned("attention=ulysses_custom", "weight_placement=shard")
    assert (job.choices.attention, job.choices.weight_placement) == ("ulysses_custom", "shard")
    assert job.choices.notes == ()
    assert job.choices.fields_of(job.config) == dict(job.config.values)


def test_unknown_devices_run_what_runs_anywhere():
    job = planned(devices=jax.devices())
    assert job.choices.attention == "dot_product"
    assert "only one slice of known TPUs" in job.notes[0]
    two_slices = [*CORES, *[replace(core, slice_index=1) for core in CORES]]
    job = planned("dcn_data_parallelism=2", devices=two_slices)
    assert job.choices.attention == "dot_product"


def test_other_problems_are_the_only_ones_reported():
    with pytest.raises(ProblemsFound) as caught:
        planned("ici_data_parallelism=3")
    assert [problem.name for problem in caught.value.problems] == ["ici_*_parallelism"]


@pytest.mark.parametrize(
    ("kind", "chosen", "reason"),
    [
        ("TPU7x", "replicate", "GiB of 90.2"),
        ("TPU v6 lite", "shard", "more than 30.1; sharded over 8 devices"),
        ("cpu", "replicate", ""),
    ],
)
def test_weights_are_replicated_where_both_experts_fit(kind, chosen, reason):
    devices = [replace(core, device_kind=kind) for core in CORES]
    choices = planned("attention=dot_product", devices=devices).choices
    assert choices.weight_placement == chosen
    assert choices.shards_weights == (chosen == "shard")
    assert reason in " ".join(choices.notes)

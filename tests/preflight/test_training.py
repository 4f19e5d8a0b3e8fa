"""The report on a training: times of kernels, memory by use, and the command on a small model."""

import json
import re
from itertools import product
from pathlib import Path

import pytest

from maxdiffusion.config.load import read_config
from maxdiffusion.costs.chips import CHIPS
from maxdiffusion.preflight.readers.collectives import find_collectives
from maxdiffusion.preflight.readers.hlo import read_program
from maxdiffusion.preflight.training import TrainingMemory
from maxdiffusion.preflight.training_job import plan_training
from maxdiffusion.preflight.training_kernels import BACKWARD, FORWARD, direction
from tests.described_tpus import DescribedCore
from tests.processes import run_python

CONFIG = Path(__file__).parents[2] / "configs/wan_tiny.yml"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("splash_mha_fwd_segmented_residuals", FORWARD),
        ("splash_mha_dkv_segmented_no_residuals", BACKWARD),
        ("splash_mha_dq_segmented_no_residuals", BACKWARD),
        ("flash_online_4608_7680_partials", FORWARD),
        ("flash_backward_1024_1024", BACKWARD),
    ],
)
def test_names_tell_the_passes_apart(name, wanted):
    assert direction(name) == wanted


def test_the_peak_is_the_sum_of_its_parts():
    memory = TrainingMemory(
        weights=1,
        running_means=2,
        moments=3,
        gradients=4,
        activations=5,
        idle_expert=6,
        other=7,
        host=100,
    )
    assert memory.peak == 28


def test_auto_trains_a14b_with_our_kernels():
    """The devices of tpu7x:2x4x4; nothing is compiled."""
    places = product(range(4), range(4), range(2), range(2))
    cores = [
        DescribedCore(coords=(x, y, z), core_on_chip=core, id=index)
        for index, (z, y, x, core) in enumerate(places)
    ]
    parsed = read_config(
        [
            *(str(CONFIG.with_name("base_wan_27b.yml")), "topology=tpu7x:2x4x4", "attention=auto"),
            *("global_batch_size=16", "ici_fsdp_parallelism=16", "ici_context_parallelism=4"),
            "remat_policy=ATTENTION",
        ]
    )
    training = plan_training(parsed, cores).training
    assert training.attention == "ulysses_ring_custom"
    shape = training.mesh.shape
    assert (shape["fsdp"], shape["ring"] * shape["ulysses"]) == (16, 4)
    plan = training.block_attention.self_attention
    assert plan.fused
    assert plan.backend.has_shard_gradients


SPARSECORE = """\
HloModule step, is_scheduled=true

%called.1 (p: f32[8,16], t: token[]) -> f32[8,4] {
  %p = f32[8,16]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = f32[8,4]{1,0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={1}
}

ENTRY %main (x: f32[8,16]) -> f32[8,4] {
  %x = f32[8,16]{1,0} parameter(0)
  %rs.call-start = ((f32[8,16]{1,0}), f32[8,4]{1,0}) call-start(%x), async_execution_thread="sparsecore", to_apply=%called.1
  %work = f32[8,16]{1,0} fusion(%x), kind=kLoop, calls=%other, backend_config={"estimated_cycles":"700"}
  ROOT %rs.call-done = f32[8,4]{1,0} call-done(%rs.call-start)
}
"""  # noqa: E501


def test_collectives_of_a_sparsecore_are_found():
    (one,) = find_collectives(read_program(SPARSECORE), {"data": 2, "fsdp": 4}, CHIPS["tpu7x"])
    assert (one.kind, one.axes, one.group_size) == ("reduce-scatter", ("fsdp",), 4)
    assert one.bytes == 8 * 4 * 4
    assert one.overlap is not None
    assert one.overlap.cycles == 700


@pytest.mark.libtpu
def test_the_command_reports_a_small_training(tmp_path):
    report = tmp_path / "training.json"
    done = run_python(
        *("-m", "maxdiffusion.preflight_train_wan", CONFIG, "topology=tpu7x:2x2x1"),
        *("attention=ulysses", "ici_data_parallelism=2", "ici_context_parallelism=4"),
        *("num_frames=1", "activations_dtype=bfloat16", "max_sequence_length=64"),
        *("global_batch_size=2", "remat_policy=FULL", "flash_min_seq_length=0"),
        *("optimizer_state_sharding=all", "idle_expert_memory=pinned_host", f"report={report}"),
        variables={},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(report.read_text())
    assert sum(found["seconds"].values()) == pytest.approx(found["predicted_seconds_per_step"])
    assert found["predicted_seconds_per_step"] > found["bound_seconds_per_step"] > 0
    assert sum(found["hbm"].values()) == found["hbm_bytes_per_device"]
    assert found["hbm"]["expert that is not trained"] == 0
    # Two experts in host memory in turn: parameters, means and two moments of the idle one.
    assert found["host_bytes_per_device"] > found["hbm"]["weights"]
    # Moments in eighths, as data x ulysses are eight devices; two of them.
    assert found["hbm"]["moments"] < 0.6 * found["hbm"]["weights"]
    directions = [direction(kernel["name"]) for kernel in found["kernels"]]
    assert sorted(directions) == [BACKWARD, BACKWARD, FORWARD]
    assert {one["kind"] for one in found["collectives"]} >= {"all-to-all"}
    assert re.search(r"HBM: .* GiB at the peak", done.stdout)

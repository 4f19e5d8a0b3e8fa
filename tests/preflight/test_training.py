"""The report on a training: times of kernels, memory by use, and the command on a small model."""

import json
import re
from pathlib import Path

import pytest

from maxdiffusion.costs.chips import CHIPS
from maxdiffusion.costs.flops import forward_flops
from maxdiffusion.costs.training import backward_share, training_bounds
from maxdiffusion.models.wan import config as sizes
from maxdiffusion.preflight.readers.collectives import find_collectives
from maxdiffusion.preflight.readers.hlo import read_program
from maxdiffusion.preflight.training import TrainingMemory
from maxdiffusion.preflight.training_kernels import BACKWARD, FORWARD, direction
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


def test_bounds_count_five_products_backward():
    """Heads of 128 fill half of an MXU of 256: 2 of 2 + 1, then 5 of 4 + 3 units of time."""
    chip = CHIPS["tpu7x"]
    assert backward_share(chip, 128) == pytest.approx(5 / 7)
    assert backward_share(CHIPS["v5p"], 128) == 1
    flops = forward_flops(sizes.wan_14b(), tokens=75_600, text_length=512, batch=16)
    bounds = training_bounds(flops, chip, backward=2, devices=64, head_dim=128)
    assert bounds.model_flops == 3 * flops.total
    speed = 64 * chip.bf16_flops
    units = flops.attention / 2 * (3 + 7) + 3 * flops.dense
    assert bounds.head_dim_aware == pytest.approx(units / speed)
    assert bounds.mfu(bounds.spec) == pytest.approx(1)
    frozen = training_bounds(flops, chip, backward=1, devices=64, head_dim=128)
    assert frozen.head_dim_aware < bounds.head_dim_aware


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
    (one,) = find_collectives(read_program(SPARSECORE), {"data": 2, "fsdp": 4})
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

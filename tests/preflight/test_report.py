"""A report put together from a recorded program: its parts add up, and people can read it."""

import dataclasses
import json

import pytest

from maxdiffusion.costs.chips import CHIPS, read_topology
from maxdiffusion.costs.flops import forward_flops, step_bounds
from maxdiffusion.costs.links import grid_network
from maxdiffusion.costs.step_time import (
    KernelFigures,
    KernelTime,
    Runs,
    VideoTime,
    format_seconds,
    step_time,
)
from maxdiffusion.models.wan import WanTransformerConfig
from maxdiffusion.preflight.command import video_time
from maxdiffusion.preflight.compile import CompiledProgram, Memory
from maxdiffusion.preflight.readers.collectives import find_collectives
from maxdiffusion.preflight.readers.cycles import Unestimated, count_cycles
from maxdiffusion.preflight.readers.hlo import read_program
from maxdiffusion.preflight.report import Report, Residence
from tests.preflight.recorded import recorded

MESH = {"data": 2, "fsdp": 1, "ring": 2, "ulysses": 2, "tensor": 1}
SIZES = WanTransformerConfig(layers=2)
TOP_KEYS = {
    "predicted_seconds_per_step",
    "bound_seconds_per_step",
    "hbm_bytes_per_device",
    "cycles_per_layer_outside_kernels",
    "kernels",
}
KERNEL = KernelFigures(
    name="flash_online_1024_1024_partials",
    purpose="self-attention",
    main_loop_bundles=1676,
    mxu_bound_bundles=1536,
    ragged_cycles=3360,
    step_bundles=173,
    q_block_bundles=679,
    spill_stores=1321,
    spill_loads=1318,
    vmem_bytes=5_550_080,
    vmem_limit_bytes=64 * 2**20,
)


@pytest.fixture(scope="module")
def report():
    topology = read_topology("tpu7x:2x2x1")
    program = read_program(recorded("denoise_step_two_layers.txt"))
    cycles = count_cycles(program, SIZES.layers, CHIPS["tpu7x"])
    collectives = find_collectives(program, MESH, CHIPS["tpu7x"])
    flops = forward_flops(SIZES, tokens=7800, text_length=512, batch=2)
    memory = Memory(
        arguments=1_652_910_080, outputs=544, temporaries=1_541_796_096, code=14_615_552
    )
    step = CompiledProgram(name="denoise_step", text="", memory=memory, flops=1.0, seconds=2.0)
    seconds = step_time(
        chip=topology.chip,
        kernels={KERNEL.name: KernelTime(call=0.5e-3, step=2e-3)},
        cycles=cycles.by_key(),
        collectives=collectives,
        network=grid_network(topology),
    )
    return Report(
        topology=topology,
        mesh=MESH,
        attention="ulysses_ring_custom",
        programs=(step,),
        residence=Residence(
            weights={"vae": 2**20}, kept=1, peak=memory.peak, peak_program=step.name
        ),
        kernels=(KERNEL,),
        cycles=cycles,
        collectives=collectives,
        flops=flops,
        bounds=step_bounds(flops, topology.chip, devices=8, head_dim=SIZES.head_dim),
        step=seconds,
        peak_step=seconds,
        video=VideoTime(programs={"denoise_step": Runs(seconds=0.5, times=40)}),
    )


def test_scripts_find_what_they_read(report):
    content = json.loads(json.dumps(report.as_json()))
    assert set(content) >= TOP_KEYS
    (kernel,) = content["kernels"]
    assert kernel["mxu_share"] == pytest.approx(1536 / 1676)
    assert {"name", "main_loop_bundles", "mxu_bound_bundles", "vmem_bytes"} <= set(kernel)
    assert content["cycles_per_layer_outside_kernels"] == report.cycles.layer


@pytest.mark.parametrize(("bundles", "warned"), [(27_468, False), (38_000, True), (60_000, True)])
def test_code_near_the_size_of_instruction_memory_is_warned_of(report, bundles, warned):
    large = dataclasses.replace(KERNEL, name="large", code_bundles=bundles)
    small = dataclasses.replace(KERNEL, code_bundles=6_000)
    found = dataclasses.replace(report, kernels=(small, large))
    content = found.as_json()
    assert content["kernel_code_bundles"] == bundles + 6_000
    assert len(content["warnings"]) == warned
    assert all(f"the code of large has {bundles:,} bundles" in one for one in content["warnings"])
    assert ("WARNING" in found.describe()) == warned
    assert f"code of all kernels: {bundles + 6_000:,} bundles" in found.describe()


def test_a_prediction_states_its_clock_and_flags(report):
    slower = dataclasses.replace(report.step, exposed_collectives=1.0)
    clocked = dataclasses.replace(report.topology, chip=report.topology.chip.as_run(pinned=False))
    found = dataclasses.replace(
        report, topology=clocked, step=slower, unpinned_step=slower, flags="--xla_a=1"
    )
    content, text = found.as_json(), found.describe()
    assert content["predicted_seconds_per_step"] == slower.total
    assert content["clock_hz"] == pytest.approx(1.939e9, rel=1e-3)
    assert content["peak_clock_seconds_per_step"] == report.step.total
    assert content["unpinned_seconds_per_step"] == slower.total
    assert content["libtpu_flags"] == "--xla_a=1"
    assert not content["job_pins_clock"]
    assert "at 1.939 GHz, not pinned (effective, as published)" in text
    assert "this job does not pin the clock; pinned (tpu_pin_clock: true)" in text
    assert "flags: --xla_a=1" in text


@pytest.mark.parametrize(
    ("chip", "pinned", "gigahertz"),
    [("tpu7x", True, 2.200), ("tpu7x", False, 1.939), ("v6e", False, 1.751)],
)
def test_the_clock_is_the_one_that_the_flags_give(chip, pinned, gigahertz):
    """No unpinned measurement is known for a v6e, so its clock is that of the stated peak."""
    assert CHIPS[chip].as_run(pinned=pinned).clock_hz / 1e9 == pytest.approx(gigahertz, abs=1e-3)


def test_weights_that_a_step_copies_are_warned_of(report):
    assert report.as_json()["copied_weight_bytes_per_step"] == 0
    found = dataclasses.replace(report, copied_weights={"a": 3 * 10**9, "b": 10**9})
    (warning,) = found.as_json()["warnings"]
    # Read and written once at 3690 GB/s.
    assert "copies 2 weights, 4.0 GB, to other tiles in every step" in warning
    assert "at least 2.168 ms" in warning
    assert warning in found.describe()


def test_operations_without_an_estimate_are_warned_of_with_their_share(report):
    assert report.as_json()["unestimated_operations"] == {}
    hidden = Unestimated(kinds={"slice": 1, "SparseCore call": 3}, bytes=369 * 10**9)
    none = Unestimated(kinds={}, bytes=0)
    found = dataclasses.replace(report, unestimated={"denoise_step": hidden, "decode": none})
    (warning,) = found.as_json()["warnings"]
    assert "no cycles for 4 operations of denoise_step (3 SparseCore call, 1 slice)" in warning
    # At 3690 GB/s, of half a second.
    assert "at least 0.100 s by their bytes, 20.0% of what it predicts" in warning
    assert warning in found.describe()
    assert [*found.as_json()["unestimated_operations"]] == ["denoise_step"]


def test_parts_add_up(report):
    content = report.as_json()
    assert sum(content["seconds"].values()) == pytest.approx(report.step.total)
    outside = report.cycles.all / report.topology.chip.clock_hz
    assert sum(report.step.outside.values()) == pytest.approx(outside)
    # Four all-to-alls of a layer stay on a chip: 20 MB, half of it to the other core, 600 GB/s.
    on_chip = 2 * 4 * 19_968_000 / 2 / 600e9
    assert report.step.exposed_collectives >= on_chip


def test_a_video_is_all_runs_of_its_programs(report):
    memory = report.programs[0].memory
    text = recorded("denoise_step_two_layers.txt")
    step, decode = (
        CompiledProgram(name=name, text=text, memory=memory, flops=1.0, seconds=1.0)
        for name in ("denoise_step", "decode")
    )
    video = video_time(
        [step, decode],
        {"denoise_step": 40, "decode": 2, "start": 1},
        2.5,
        network=grid_network(report.topology),
    )
    # Other programs take their cycles and collectives; the kernels of this one have no figures.
    once = sum(report.step.outside.values())
    assert video.programs["decode"].seconds > once
    assert video.total == pytest.approx(40 * 2.5 + 2 * video.programs["decode"].seconds)
    assert "decode, 2 x" in "\n".join(video.lines())
    assert video.as_json()["denoise_step"]["seconds"] == 100.0


def test_no_step_is_quicker_than_its_bound(report):
    assert report.step.total > report.bounds.head_dim_aware > report.bounds.spec
    assert 0 < report.mfu < 1


def test_people_read_the_same(report):
    words = report.describe()
    assert f"predicted: {format_seconds(report.step.total)}/step" in words
    assert "main loop 1,676 bundles, MXU bound 1,536 (91.6%)" in words
    assert "VMEM 5.3 of 64 MiB" in words
    assert "all-to-all over ulysses of 2, exposed" in words
    assert "collective-permute over ring of 2, under" in words
    assert "DOES NOT FIT" not in words


def test_a_job_that_does_not_fit_says_so(report):
    full = dataclasses.replace(report.residence, peak=97 * 2**30)
    assert "DOES NOT FIT" in dataclasses.replace(report, residence=full).describe()


def test_without_kernels_the_report_says_so(report):
    bare = dataclasses.replace(report, kernels=())
    assert "kernels: none" in bare.describe()


@pytest.mark.parametrize(
    ("seconds", "words"), [(2.6334, "2.633 s"), (0.0123456, "12.35 ms"), (4e-7, "0.0004 ms")]
)
def test_times_have_their_unit(seconds, words):
    assert format_seconds(seconds) == words

"""The command itself, on a small model, with libtpu's compiler; needs no TPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/wan_tiny.yml"
SPLIT = ("ici_data_parallelism=2", "ici_context_parallelism=4", "ulysses_shards=2")


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "maxdiffusion.preflight_wan", str(CONFIG), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    report = tmp_path_factory.mktemp("preflight") / "preflight.json"
    done = run(
        "topology=tpu7x:2x2x1",
        "attention=ulysses_ring_custom",
        *SPLIT,
        "num_frames=1",
        "weights_dtype=bfloat16",
        "activations_dtype=bfloat16",
        f"report={report}",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, json.loads(report.read_text())


def test_the_report_has_what_scripts_read(finished):
    _, report = finished
    assert report["predicted_seconds_per_step"] >= report["bound_seconds_per_step"] > 0
    assert report["bound_seconds_per_step"] >= report["spec_bound_seconds_per_step"]
    assert 0 < report["hbm_bytes_per_device"] < 2**30
    assert report["cycles_per_layer_outside_kernels"] > 0
    assert sum(report["seconds"].values()) == pytest.approx(report["predicted_seconds_per_step"])
    assert [program["name"] for program in report["programs"]] == [
        *("denoise_step", "read_text", "start", "decode", "text_encoder")
    ]


def test_kernels_have_their_machine_code_read(finished):
    kernels = {kernel["purpose"]: kernel for kernel in finished[1]["kernels"]}
    assert set(kernels) == {"self-attention", "cross-attention"}
    for kernel in kernels.values():
        assert kernel["main_loop_bundles"] > 0
        assert 0 < kernel["mxu_share"] <= 1
        assert kernel["mxu_bound_bundles"] > 0
        assert 0 < kernel["vmem_bytes"] <= kernel["vmem_limit_bytes"]
    assert kernels["self-attention"]["name"] == "flash_online_128_128_partials"


def test_exchanges_are_those_of_the_plan(finished):
    layers = [one for one in finished[1]["collectives"] if one["times"] > 1]
    kinds = [(one["kind"], tuple(one["axes"])) for one in layers]
    assert kinds.count(("all-to-all", ("ulysses",))) == 4
    assert kinds.count(("collective-permute", ("ring",))) == 2
    hops = [one for one in layers if one["kind"] == "collective-permute"]
    assert all(one["asynchronous"] for one in hops)


def test_people_see_progress_and_a_report(finished):
    output, _ = finished
    assert "[1/5] compiling denoise_step ..." in output
    assert "preflight for tpu7x:2x2x1: 4 chips, 8 devices" in output
    assert "mesh: data 2 x fsdp 1 x ring 2 x ulysses 2 x tensor 1" in output
    assert "of 1153.5 TFLOP/s (bf16) a device" in output


def test_a_mesh_that_does_not_fit_is_refused():
    done = run("topology=v6e:2x2", "ici_data_parallelism=2", "ici_context_parallelism=4")
    assert done.returncode == 2
    assert "number of devices in a slice is 4" in done.stderr
    assert done.stdout == ""

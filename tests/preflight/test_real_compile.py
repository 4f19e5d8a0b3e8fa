"""The command itself, on a small model, with libtpu's compiler; needs no TPU."""

import fcntl
import json
import re
from pathlib import Path

import pytest

from maxdiffusion.pipelines.aot_cache import read_executable, read_key
from maxdiffusion.runtime.files import CacheKey
from tests.processes import output_of, run_python

pytestmark = pytest.mark.libtpu
ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/wan_tiny.yml"
SPLIT = ("ici_data_parallelism=2", "ici_context_parallelism=4", "ulysses_shards=2")


def preflight_wan(*arguments, **variables):
    command = ("-m", "maxdiffusion.preflight_wan", CONFIG)
    return run_python(*command, *arguments, variables=variables, timeout=900)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preflight")
    report = folder / "preflight.json"
    done = preflight_wan(
        "topology=tpu7x:2x2x1",
        "attention=ulysses_ring_custom",
        *SPLIT,
        "num_frames=1",
        "weights_dtype=bfloat16",
        "activations_dtype=bfloat16",
        "max_sequence_length=64",
        f"aot_cache_dir={folder / 'programs'}",
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


def test_collectives_are_those_of_the_plan(finished):
    layers = [one for one in finished[1]["collectives"] if one["times"] > 1]
    kinds = [(one["kind"], tuple(one["axes"])) for one in layers]
    assert kinds.count(("all-to-all", ("ulysses",))) == 4
    assert kinds.count(("collective-permute", ("ring",))) == 2
    hops = [one for one in layers if one["kind"] == "collective-permute"]
    assert all(one["asynchronous"] for one in hops)


def test_a_guided_step_sums_no_latents_over_the_data_axis(finished):
    """The rows of prompt and negative prompt are gathered, and every device samples."""
    once = [one for one in finished[1]["collectives"] if one["times"] == 1]
    assert any(one["kind"] == "all-gather" and "data" in one["axes"] for one in once)
    # The question whether all latents are finite is one number.
    assert all(one["bytes"] <= 4 for one in once if one["kind"] == "all-reduce")


def test_people_see_progress_and_a_report(finished):
    output, _ = finished
    assert "[1/5] compiling denoise_step ..." in output
    assert "preflight for tpu7x:2x2x1: 4 chips, 8 devices" in output
    assert "mesh: data 2 x fsdp 1 x ring 2 x ulysses 2 x tensor 1" in output
    assert "of 1153.5 TFLOP/s (bf16) a device" in output


def test_programs_for_a_tpu_are_kept_for_the_job(finished):
    output, report = finished
    kept = re.findall(r"aot_cache_dir: stored (\w+) as (\S+)", output)
    assert [name for name, _ in kept] == [program["name"] for program in report["programs"]]
    folder = Path(re.search(r"wrote (\S+)", output)[1]).parent / "programs"
    for name, file in kept:
        key = read_key(folder / file)
        assert (key["program"], key["platform"], key["device kind"]) == (name, "tpu", "TPU7x")
        assert len(key["devices"]) == 8
        assert key["libtpu"].startswith("0.0.42")
        assert read_executable(folder / file, CacheKey(key))


def test_a_mesh_that_does_not_fit_is_refused():
    done = preflight_wan("topology=v6e:2x2", "ici_data_parallelism=2", "ici_context_parallelism=4")
    assert done.returncode == 2
    assert "number of devices in a slice is 4" in done.stderr
    assert done.stdout == ""


def test_a_second_process_that_may_not_share_libtpu_is_told_so():
    with Path("/tmp/libtpu_lockfile").open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        done = preflight_wan("topology=tpu7x:2x2x1", ALLOW_MULTIPLE_LIBTPU_LOAD="0")
    assert done.returncode == 2
    assert "another process holds libtpu's lock" in done.stderr
    assert "ALLOW_MULTIPLE_LIBTPU_LOAD=1" in done.stderr


REFUSALS = """
import sys
from maxdiffusion.costs.chips import read_topology
from maxdiffusion.preflight.devices import describe_devices, prepare_environment
topology = read_topology("tpu7x:2x2x1")
prepare_environment(topology)
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec
from maxdiffusion.mesh import single_device_mesh
from maxdiffusion.preflight.compile import ProgramMaker, compile_program
from maxdiffusion.errors import ProblemsFound

mesh = single_device_mesh(describe_devices(topology)[0])

def compiled(function, *shape, dtype=jnp.float32):
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        return jax.jit(function).lower(x).compile()

def kernel(body, limit=None):
    params = pltpu.CompilerParams(vmem_limit_bytes=limit)
    return lambda x: pl.pallas_call(
        body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), compiler_params=params
    )(x)

def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2

def reverse(x_ref, o_ref):
    o_ref[...] = x_ref[...][:, ::-1]

for program, make in {
    "denoise_step": lambda: compiled(kernel(double, 2**20), 4096, 1024),
    "decode": lambda: compiled(jnp.sin, 2**18, 2**17, dtype=jnp.bfloat16),
    "read_text": lambda: compiled(kernel(reverse), 8, 128),
}.items():
    try:
        compile_program(ProgramMaker(name=program, compile=make), topology.chip)
        print(program, "COMPILED")
    except ProblemsFound as error:
        print(error)
"""


def test_what_the_compiler_refuses_becomes_sentences_with_keys():
    vmem, hbm, layout = output_of("-c", REFUSALS).strip().splitlines()
    assert "a kernel needs more VMEM than it may use" in vmem
    assert "Lower flash_block_sizes.block_q" in vmem
    assert "does not fit into the device's HBM" in hbm
    assert "96 GiB a device" in hbm
    assert "vae_tiling=true" in hbm
    assert layout.startswith("read_text='compile error': a kernel has no form on TPU7x")
    assert "multiples of 128 for flash_block_sizes.block_q" in layout

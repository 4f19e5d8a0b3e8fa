"""What a load costs a process: the bytes it reads and the memory it takes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.checkpoints.small_model import save, tensors

ROOT = Path(__file__).parents[2]


def start(*arguments, devices=1):
    """A process that runs load_alone.py with these arguments (as JSON, after task and folder)."""
    task, folder, *rest = arguments
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [
            sys.executable,
            Path(__file__).with_name("load_alone.py"),
            task,
            folder,
            *map(json.dumps, rest),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | {"PYTHONPATH": f"{ROOT}:{ROOT}/src", "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )


def result(process):
    """The JSON that the process printed; the collectives of CPUs print lines of their own."""
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads([line for line in output.splitlines() if line.startswith("{")][-1])


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """Eight float32 matrices of 26 MB each: 210 MB."""
    folder = tmp_path_factory.mktemp("stack")
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((2560, 2560), np.float32)
    values = {f"blocks.{layer}.weight": matrix for layer in range(8)}
    save_file(values, folder / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("buffer", ["HostBuffer", "DeviceBuffer"])
def test_memory_is_the_parameters_and_little_more(stack, buffer):
    cost = result(start("memory", stack, buffer, 8, 2560))
    tensor = 2560 * 2560 * 4
    assert cost["read"] == 8 * tensor
    # Beside the parameters: 4 threads that each hold a read of 4 MB, its bfloat16 rearrangement and
    # (DeviceBuffer) its transfer, and programs of jax. A second copy would be four tensors' worth.
    assert cost["growth"] - cost["held"] < 3 * tensor


# In the second order the devices of a process are not neighbours along the tensor axis.
@pytest.mark.slow
@pytest.mark.parametrize("order", [list(range(8)), [0, 4, 1, 5, 2, 6, 3, 7]], ids=["rows", "mixed"])
def test_two_processes_read_only_their_slices(tmp_path, order):
    folder = save(tmp_path, tensors())
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    pair = [start("slices", folder, address, number, order, devices=4) for number in range(2)]
    costs = [result(process) for process in pair]
    whole = sum(value.nbytes for value in tensors().values())
    for cost in costs:
        assert cost["devices"] == 8
        assert cost["read"] <= cost["needed"] == cost["held"] < whole
    assert sum(cost["read"] for cost in costs) == whole  # what both hold is read by one

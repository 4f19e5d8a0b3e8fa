"""The cost of a load for a process: the bytes that it reads and the memory that it takes."""

import contextlib
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
ALONE = Path(__file__).with_name("load_alone.py")


def costs_of(folder, *calls, devices=1):
    """What load_alone.py wrote for each call (task, folder, JSON arguments), all run at once."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    own = {"PYTHONPATH": f"{ROOT}:{ROOT}/src", "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    outcomes = [folder / f"cost_{number}.json" for number in range(len(calls))]
    with contextlib.ExitStack() as stack:
        running = []
        for outcome, (task, stored, *rest) in zip(outcomes, calls, strict=True):
            arguments = [outcome, task, stored, *map(json.dumps, rest)]
            command = [sys.executable, ALONE, *arguments]
            running.append(stack.enter_context(subprocess.Popen(command, env=os.environ | own)))
            stack.callback(running[-1].kill)
        assert [process.wait(timeout=300) for process in running] == [0] * len(running)
    return [json.loads(outcome.read_text()) for outcome in outcomes]


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
def test_memory_is_the_parameters_and_little_more(stack, buffer, tmp_path):
    [cost] = costs_of(tmp_path, ("memory", stack, buffer, 8, 2560))
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
    calls = [("slices", folder, address, number, order) for number in range(2)]
    costs = costs_of(tmp_path, *calls, devices=4)
    whole = sum(value.nbytes for value in tensors().values())
    for cost in costs:
        assert cost["devices"] == 8
        assert cost["read"] <= cost["needed"] == cost["held"] < whole
    assert sum(cost["read"] for cost in costs) == whole  # what both hold is read by one

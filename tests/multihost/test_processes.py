"""Real processes: they join or say why not, agree or name the odd one, and end together."""

import json
import signal
import socket
import time

import pytest

from tests.checkpoints.small_model import save, tensors
from tests.multihost.launching import ROOT, TINY, free_address, launched, run

WORKER = ROOT / "tests" / "multihost" / "worker.py"
COMMAND = ("-m", "maxdiffusion.generate_wan", TINY)


def test_a_process_that_differs_is_named_before_weights_are_touched(tmp_path):
    own = [("seed=1",), ("seed=1",), ("seed=2",), ("seed=1",)]
    command = (*COMMAND, f"output_dir={tmp_path / 'out'}", "height=48", "width=32")
    with launched(4, command, own=own) as started:
        codes = [one.end() for one in started]
        said = [one.output for one in started]
    assert codes == [2, 2, 2, 2], said
    for one in said:
        assert "seed on process 2 (host" in one
        assert "=2: is 1 on the other processes." in one
        assert "model:" not in one  # the plan, which comes before weights
    assert not (tmp_path / "out").exists()


def test_a_job_that_does_not_come_together_says_where_and_how_long(tmp_path):
    address = free_address()
    waiting = (
        *(f"jax_coordinator_address={address}", "jax_num_processes=2"),
        *("jax_distributed_initialization_timeout=3", f"output_dir={tmp_path}"),
    )
    with launched(1, (*COMMAND, *waiting, "jax_process_id=0")) as (first,):
        assert first.end() == 1
        said = first.output
    assert "process 0 of 2 on host" in said
    assert f"could not join the job at {address} within" in said
    assert "jax_distributed_initialization_timeout=3 s" in said
    assert "others are missing" in said


def test_only_the_first_process_needs_a_place_for_videos(tmp_path):
    # A file in the place of the folder: nothing can be written there, whoever asks.
    (tmp_path / "file").write_text("")
    command = (*COMMAND, f"output_dir={tmp_path / 'file' / 'videos'}")
    with launched(2, command) as started:
        assert [one.end() for one in started] == [2, 1], [one.output for one in started]
        first, second = (one.output for one in started)
    assert "1 problem, nothing was run:\n  output_dir=" in first
    assert "stopped: process 0 (host" in second


def test_a_host_whose_devices_do_not_start_is_named(tmp_path):
    no_devices = ({}, {"JAX_PLATFORMS": "rocm"})
    with launched(2, (*COMMAND, f"output_dir={tmp_path}"), own_variables=no_devices) as started:
        began = time.monotonic()
        codes = [one.end() for one in started]
        first, second = (one.output for one in started)
    assert codes == [1, 1], first + second
    assert time.monotonic() - began < 45  # jax's own patience is 100 s, and ends in a core dump
    reason = "the devices of this process did not start: RuntimeError: Unable to initialize backend"
    assert f"stopped: {reason}" in second
    assert f"stopped: process 1 (host {socket.gethostname()}, pid" in first
    assert f"failed: {reason}" in first
    assert "Traceback" not in first + second


def test_processes_that_diverge_or_stand_still_are_named(tmp_path):
    with launched(2, (WORKER, "stand_still", tmp_path)) as started:
        started[1].wait_for("diverged")
        began = time.monotonic()
        codes = [one.end() for one in started]
        said = [one.output for one in started]
    assert codes == [1, 1], said
    assert time.monotonic() - began < 60  # of which 2 are the limit; the culprit sleeps for 120
    for one in said:
        assert "diverged: the latents of seed 7 differs on process 1 (host" in one
        assert "stopped: process 1 (host" in one
        assert "hangs at 'before the step'" in one
        assert "others wait at 'the step'" in one
    assert "time.sleep" in said[1] or "stand_still" in said[1]  # where the culprit stood


def test_who_dies_is_named_by_those_who_live(tmp_path):
    # Killed: found by the beats that do not come.
    with launched(2, (WORKER, "wait", tmp_path)) as (first, second):
        both_wait(first, second)
        second.kill()
        assert_stopped(
            first, f"pid {second.process.pid}) sent no heartbeat for", "Last stage: waiting"
        )
    # Frozen, where the service lives: its answers do not come.
    with launched(2, (WORKER, "wait", tmp_path)) as (first, second):
        both_wait(first, second)
        first.kill(signal.SIGSTOP)
        assert_stopped(
            second,
            f"pid {first.process.pid}), which runs the coordination service, does not answer",
        )
    # Aborted: it says so itself.
    with launched(2, (WORKER,), own=[("wait", tmp_path), ("abort", tmp_path)]) as (first, second):
        assert second.end() == -signal.SIGABRT
        assert "in abort" in second.output  # where it stood
        assert_stopped(first, f"pid {second.process.pid}) failed: aborted in native code")


def both_wait(*processes):
    for process in processes:
        process.wait_for("waits")


def assert_stopped(process, *words):
    began = time.monotonic()
    assert process.end() == 1, process.output
    assert time.monotonic() - began < 30  # of which 4 are the limit
    for said in ("stopped: process ", *words):
        assert said in process.output


@pytest.mark.parametrize("processes", [2, 4])
def test_what_all_hold_is_read_once_in_the_job(tmp_path, processes):
    folder = save(tmp_path, tensors())
    whole = sum(value.nbytes for value in tensors().values())
    run(processes, (WORKER, "load", folder))
    costs = [json.loads((folder / f"costs_{index}.json").read_text()) for index in range(processes)]
    for number, loads in enumerate(zip(*costs, strict=True)):
        assert sum(load["read"] for load in loads) == whole
        if number != 1:  # there the first process reads small ones for all, and needs a part
            assert all(load["read"] <= load["needed"] for load in loads)
    # On the first mesh all weights are everywhere: each process needs them all.
    assert {one[0]["needed"] for one in costs} == {whole}
    # In parts, each process reads about as much as the others.
    assert abs(costs[0][2]["read"] - whole / processes) < whole / 4

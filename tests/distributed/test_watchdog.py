"""The process to blame, by what all of them have published."""

import pytest

from maxdiffusion.distributed.coordination import Process
from maxdiffusion.distributed.initialize import Timeouts
from maxdiffusion.distributed.watchdog import (
    GRACE_SECONDS,
    Diagnosis,
    Fault,
    Heartbeat,
    Received,
    Watchdog,
    diagnose,
)
from maxdiffusion.runtime.progress import Progress, ProgressSnapshot
from tests.distributed.memory_service import MemoryClient, services

PROCESSES = tuple(Process(index=index, host=f"host-{index}", pid=100 + index) for index in range(3))
TIMEOUTS = Timeouts(heartbeat=100, hang=600)


def beat(number, *, quiet=0.0, arrived=0.0):
    progress = ProgressSnapshot(number=number, stage=f"step {number}", quiet_seconds=quiet)
    return Received(text=Heartbeat(count=1, progress=progress).as_json(), arrived=arrived)


def diagnosis(beats, failures=None, *, now=0.0):
    return diagnose(PROCESSES, dict(enumerate(beats)), failures or {}, now=now, timeouts=TIMEOUTS)


def test_processes_that_move_are_left_alone():
    assert diagnosis([beat(4), beat(5, quiet=500), beat(4)], now=1.0) is None
    # Those who wait for a slow one may wait: it still moves.
    assert diagnosis([beat(5, quiet=900), beat(5, quiet=900), beat(4, quiet=10)]) is None


def test_a_failure_is_reported_after_the_others_had_time_to_fail_alike():
    failures = {1: Received(text="the disk is full", arrived=10.0)}
    beats = [beat(4, arrived=10.0)] * 3
    assert diagnosis(beats, failures, now=10.0 + GRACE_SECONDS / 2) is None
    found = diagnosis(beats, failures, now=11.0 + GRACE_SECONDS)
    assert found == Diagnosis(
        fault=Fault.FAILED, text="process 1 (host host-1, pid 101) failed: the disk is full"
    )


def test_a_process_without_heartbeats_is_dead_before_jax_ends_the_job():
    beats = [beat(4, arrived=60.0), beat(4, arrived=60.0), beat(3, arrived=1.0)]
    assert diagnosis(beats, now=50.0) is None
    found = diagnosis(beats, now=60.0)
    assert found.fault is Fault.DEAD
    assert found.text.startswith(
        "process 2 (host host-2, pid 102) sent no heartbeat for 59 s (limit 50 s)"
    )
    assert found.text.endswith("Last stage: step 3")
    assert TIMEOUTS.dead < TIMEOUTS.heartbeat


def test_of_processes_that_hang_the_last_is_named():
    found = diagnosis([beat(5, quiet=650), beat(4, quiet=601), beat(5, quiet=650)])
    assert found.fault is Fault.HUNG
    assert found.text.startswith("process 1 (host host-1, pid 101) hangs at 'step 4' for 601 s")
    assert found.text.endswith("while others wait at 'step 5'")
    all_of_them = diagnosis([beat(5, quiet=700)] * 3)
    assert all_of_them.fault is Fault.HUNG
    assert all_of_them.text.startswith("all processes hang at 'step 5' for 700 s")


def test_no_process_is_blamed_before_all_have_sent_a_heartbeat():
    assert diagnosis([beat(5, quiet=700)] * 2) is None


@pytest.mark.parametrize("fault", Fault)
def test_a_diagnosis_is_read_as_it_was_published(fault):
    published = Diagnosis(fault=fault, text="process 1 failed: 'quotes'\nand lines")
    assert Diagnosis.from_json(published.as_json()) == published


def test_the_first_published_diagnosis_counts_for_all():
    dogs = [
        Watchdog(PROCESSES[:2], TIMEOUTS, address="localhost:1", service=service)
        for service in services(MemoryClient(), 2)
    ]
    mine, other = (Diagnosis(fault=Fault.DEAD, text=text) for text in ("first", "second"))
    assert dogs[0]._publish_diagnosis(mine) == mine
    assert dogs[1]._publish_diagnosis(other) == mine
    assert dogs[1]._diagnosis() == mine


def test_progress_counts_stages_and_seconds_without_a_sign():
    progress = Progress()
    progress.checkpoint("loading")
    first = progress.snapshot()
    assert (first.number, first.stage) == (1, "loading")
    later = progress.snapshot()
    assert later.quiet_seconds > first.quiet_seconds >= 0
    progress.heartbeat()
    assert progress.snapshot().number == 1

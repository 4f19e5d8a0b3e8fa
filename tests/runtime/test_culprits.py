"""Who is to blame, by what the processes have said."""

import json

from maxdiffusion.runtime.coordination import Member
from maxdiffusion.runtime.culprits import GRACE_SECONDS, Word, find_culprit
from maxdiffusion.runtime.joining import Patience

MEMBERS = tuple(Member(index=index, host=f"host-{index}", pid=100 + index) for index in range(3))
PATIENCE = Patience(heartbeat=100, hang=600)


def beat(number, *, quiet=0.0, arrived=0.0):
    mark = {"n": 1, "number": number, "stage": f"step {number}", "quiet": quiet}
    return Word(text=json.dumps(mark), arrived=arrived)


def culprit(beats, failures=None, *, now=0.0):
    return find_culprit(MEMBERS, dict(enumerate(beats)), failures or {}, now=now, patience=PATIENCE)


def test_processes_that_move_are_left_alone():
    assert culprit([beat(4), beat(5, quiet=500), beat(4)], now=1.0) is None
    # Those who wait for a slow one may wait: it still moves.
    assert culprit([beat(5, quiet=900), beat(5, quiet=900), beat(4, quiet=10)]) is None


def test_a_failure_is_told_after_the_others_had_time_to_fail_alike():
    failures = {1: Word(text="stopped: the disk is full", arrived=10.0)}
    beats = [beat(4, arrived=10.0)] * 3
    assert culprit(beats, failures, now=10.0 + GRACE_SECONDS / 2) is None
    told = culprit(beats, failures, now=11.0 + GRACE_SECONDS)
    assert told == "process 1 (host host-1, pid 101) failed: stopped: the disk is full"


def test_a_process_without_a_sign_is_dead_before_jax_ends_the_job():
    beats = [beat(4, arrived=60.0), beat(4, arrived=60.0), beat(3, arrived=1.0)]
    assert culprit(beats, now=50.0) is None
    told = culprit(beats, now=60.0)
    assert told.startswith("process 2 (host host-2, pid 102) gave no sign for 59 s (limit 50 s)")
    assert told.endswith("Last seen at: step 3")
    assert PATIENCE.dead < PATIENCE.heartbeat


def test_of_processes_that_stand_still_the_last_is_named():
    told = culprit([beat(5, quiet=650), beat(4, quiet=601), beat(5, quiet=650)])
    assert told.startswith("process 1 (host host-1, pid 101) hangs at 'step 4' for 601 s")
    assert told.endswith("while others wait at 'step 5'")
    together = culprit([beat(5, quiet=700)] * 3)
    assert together.startswith("all processes stand at 'step 5' for 700 s")


def test_nobody_is_blamed_before_all_have_spoken():
    assert culprit([beat(5, quiet=700)] * 2) is None

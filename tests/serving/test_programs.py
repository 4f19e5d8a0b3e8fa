"""Programs in the background: the same orders on all processes, ready when all have them."""

import json
import threading
import time

from maxdiffusion.serving.device import programs
from maxdiffusion.serving.device.programs import BackgroundPrograms


class Process:
    """One process: records what it compiles; compiling waits for `go`."""

    def __init__(self):
        self.go, self.compiled = threading.Semaphore(0), []
        self.programs = BackgroundPrograms(
            self.compile, lambda error: ("no", str(error)), lambda: None
        )

    def compile(self, fields):
        assert self.go.acquire(timeout=10)
        self.compiled.append(fields["size"])
        if fields["size"] == "huge":
            raise ValueError("too large")


def agree(*processes):
    said = json.loads(json.dumps([process.programs.say() for process in processes]))
    for process in processes:
        process.programs.hear(said)


def wait_until(condition):
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_a_kind_is_ready_when_every_process_has_compiled_it():
    first, second = Process(), Process()
    for size in ("small", "large", "small"):
        first.programs.order(size, {"size": size})
    agree(first, second)
    assert first.programs.is_busy
    assert second.programs.is_busy
    for _ in range(2):
        first.go.release()
    wait_until(lambda: not first.programs.is_busy)
    agree(first, second)
    assert not first.programs.is_ready("small")
    second.go.release()
    wait_until(lambda: second.compiled == ["small"])
    wait_until(lambda: 0 in second.programs._finished)
    agree(first, second)
    assert first.programs.is_ready("small")
    assert not first.programs.is_ready("large")
    second.go.release()
    wait_until(lambda: not second.programs.is_busy)
    agree(first, second)
    assert first.programs.is_ready("large")
    assert first.compiled == second.compiled == ["small", "large"]


def test_a_failure_on_one_process_is_one_of_the_kind_and_others_go_on():
    first = Process()
    for size in ("huge", "small"):
        first.programs.order(size, {"size": size})
        first.go.release()
    agree(first)
    wait_until(lambda: not first.programs.is_busy)
    agree(first)
    assert first.programs.failure("huge") == ("no", "too large")
    assert not first.programs.is_ready("huge")
    assert first.programs.is_ready("small")
    assert first.programs.failure("small") is None
    assert first.programs.failure("unknown") is None


def test_the_number_of_kinds_is_limited(monkeypatch):
    monkeypatch.setattr(programs, "MOST_KINDS", 2)
    first = Process()
    first.programs.add("served")
    for size in ("small", "large"):
        assert first.programs.failure(size) is None
        first.programs.order(size, {"size": size})
    assert first.programs.failure("third")[0] == "too_many_kinds"
    assert first.programs.failure("small") is None
    assert first.programs.failure("served") is None

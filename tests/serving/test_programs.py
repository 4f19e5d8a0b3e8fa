"""Programs in the background: the same orders on all processes, ready when all have them."""

import json
import threading
import time

from maxdiffusion.serving.device import programs
from maxdiffusion.serving.device.programs import BackgroundPrograms


class Process:
    """One process: records what it compiles; compiling waits for `go`."""

    def __init__(self):
        self.go, self.compiled, self.held = threading.Semaphore(0), [], set()
        self.programs = BackgroundPrograms(
            self.compile, self.held.difference_update, lambda error: ("no", str(error)), int
        )

    def compile(self, fields, keys):
        assert self.go.acquire(timeout=10)
        self.compiled.append(fields["size"])
        keys |= {"encoder", fields["size"]}
        self.held |= keys
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


def compiled(processes, *sizes):
    """Orders kinds, and waits until all processes have them."""
    for size in sizes:
        assert processes[0].programs.order(size, {"size": size})
    for process in processes:
        process.go.release(len(sizes))
    agree(*processes)
    for process in processes:
        wait_until(lambda one=process: not one.programs.is_busy)
    agree(*processes)


def test_the_kind_that_was_not_used_for_the_longest_time_makes_room(monkeypatch):
    monkeypatch.setattr(programs, "MOST_KINDS", 2)
    first, second = both = Process(), Process()
    for process in both:
        process.go.release()
        process.programs.compile_now("served", {"size": "served"})
    compiled(both, "small", "large")
    first.programs.use("small")
    first.programs.choose()
    compiled(both, "third")
    assert [first.programs.is_ready(kind) for kind in ("served", "small", "third")] == [True] * 3
    assert not first.programs.is_ready("large")
    # Programs that other kinds have too are kept, on all processes.
    assert first.held == second.held == {"encoder", "served", "small", "third"}
    compiled(both, "large")
    assert first.programs.is_ready("large")
    assert first.held == second.held == {"encoder", "served", "third", "large"}


def test_programs_that_are_needed_or_in_the_compiler_do_not_go(monkeypatch):
    monkeypatch.setattr(programs, "MOST_KINDS", 2)
    first = Process()
    compiled([first], "small")
    assert first.programs.order("large", {"size": "large"})
    first.programs.choose()
    first.programs.use("small")  # a job of this kind may be taken
    assert not first.programs.order("third", {"size": "third"})
    first.programs.run("small")
    assert not first.programs.order("third", {"size": "third"})
    first.programs.choose()  # it has ended
    assert first.programs.order("third", {"size": "third"})
    assert not first.programs.is_ready("small")


def test_a_kind_that_failed_makes_room(monkeypatch):
    monkeypatch.setattr(programs, "MOST_KINDS", 1)
    first = Process()
    compiled([first], "huge")
    assert first.programs.failure("huge") is not None
    compiled([first], "small")
    assert first.programs.failure("huge") is None
    assert first.programs.is_ready("small")

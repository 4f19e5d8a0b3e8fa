"""Coordinates the processes of a job: barrier, broadcast, gather, comparison, preemption.

Every process must call these functions equally often and in the same order. With one process they
return at once and send nothing. After SIGTERM, the notice of preemption, all processes stop at the
same step:

    with PREEMPTION.guard():
        for step in PREEMPTION.until_preempted(steps):   # raises Preempted between two steps
            ...
"""

import functools
import itertools
import json
import os
import signal
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, final

import jax
from etils import epath
from jax.experimental import multihost_utils

from maxdiffusion.errors import Problem, ProblemsFound, RunFailed
from maxdiffusion.runtime.files import FilePath, as_path, new_folder, only_writer
from maxdiffusion.runtime.timing import HostTimes, Timings

ROOT = "maxdiffusion"
TESTED_JAX = "0.10"
POLL_SECONDS = 5.0  # Python handles signals only between blocking calls


class NoAnswer(RunFailed):
    """A process did not publish its value in time."""


class UnsupportedJax(RunFailed):
    """The installed jax lacks an internal that jobs of several processes need."""

    def __init__(self, name: str):
        super().__init__(
            f"jax {jax.__version__} has no {name}, which jobs of several processes need. Install "
            f"jax {TESTED_JAX}, or set skip_jax_distributed_system=true to run one process."
        )


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of a job: its index in the order of joining, its host and its pid."""

    index: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.index} (host {self.host}, pid {self.pid})"


@final
class Service:
    """The key-value store of a job, as seen by one of its processes."""

    def __init__(self, client: Any, *, index: int, count: int):
        self._client, self.index, self.count = client, index, count

    def publish(self, key: str, text: str) -> None:
        """Writes the value of a new key. Raises an error of jax if the key has one."""
        self._client.key_value_set(f"{ROOT}/{key}", text)

    def update(self, key: str, text: str) -> None:
        """Writes a value, over an older one of the same key."""
        self._client.key_value_set(f"{ROOT}/{key}", text, allow_overwrite=True)

    def receive(self, key: str, *, sender: int, timeout: float) -> str:
        """Waits for a value. Raises NoAnswer, with the sender's index, after `timeout` seconds."""
        ends = time.monotonic() + timeout
        while True:
            left = max(0.001, min(POLL_SECONDS, ends - time.monotonic()))
            try:
                return self._client.blocking_key_value_get(f"{ROOT}/{key}", int(left * 1000))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if time.monotonic() >= ends:
                    raise NoAnswer(f"process {sender} did not answer for {timeout:g} s") from error

    def entries(self, folder: str) -> dict[str, str]:
        """Returns all values below `folder`, by the rest of their keys."""
        prefix = f"{ROOT}/{folder}/"
        found = self._client.key_value_dir_get(prefix.rstrip("/"))
        return {key.split(prefix, 1)[1]: value for key, value in found}

    def delete(self, key: str) -> None:
        """Removes a value."""
        self._client.key_value_delete(f"{ROOT}/{key}")


def this_process() -> Process:
    """Returns this process; its index is 0 before it has joined a job."""
    index = _global_state().process_id if jax.distributed.is_initialized() else 0
    return Process(index=index, host=socket.gethostname(), pid=os.getpid())


def is_multiprocess() -> bool:
    """Returns whether this process has joined a job of more than one process."""
    return jax.distributed.is_initialized() and _global_state().num_processes > 1


def writes_files() -> bool:
    """Returns whether this is the process that writes the files of the job."""
    return not is_multiprocess() or jax.process_index() == 0


def joined_service() -> Service:
    """Returns the service of the job that this process has joined."""
    state = _global_state()
    assert state.client is not None, "jax.distributed is not initialized"
    return Service(state.client, index=state.process_id, count=state.num_processes)


def auto_detect(
    address: str | None, processes: int | None, process: int | None, *, timeout: int
) -> tuple[str | None, int | None, int | None]:
    """Fills in missing values from the cluster that jax detects, if it detects one.

    jax knows Cloud TPU slices, GKE (JobSets too), Slurm and Open MPI.
    """
    try:
        from jax._src.clusters import ClusterEnv
    except ImportError as error:
        raise UnsupportedJax("jax._src.clusters.ClusterEnv") from error
    detected = ClusterEnv.auto_detect_unset_distributed_params(
        address, processes, process, None, None, timeout
    )
    return detected[0], detected[1], detected[2]


def _global_state() -> Any:
    try:
        from jax._src.distributed import global_state
    except ImportError as error:
        raise UnsupportedJax("jax._src.distributed.global_state") from error
    return global_state


# The watchdog ends a job that hangs much earlier; this limits jobs that run without it.
TIMEOUT_SECONDS = 24 * 3600.0
REMEDY = "Start all processes with the same command, package, files and model"
SHOWN_CHARACTERS, CHARACTERS_BEFORE = 120, 30  # of a value, and before the first difference

Value = TypeVar("Value")


class Diverged(RunFailed):
    """Processes that compute the same value have different results."""


@final
class Coordinator:
    """Gathers strings over a service. Counts the rounds of each topic, so that none is mixed up."""

    def __init__(self, service: Service):
        self._service = service
        self._rounds: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

    @functools.cached_property
    def processes(self) -> tuple[Process, ...]:
        """Returns all processes in order. All must use it: the first use gathers them."""
        texts = self.all_gather("processes", json.dumps(asdict(this_process())))
        return tuple(Process(**json.loads(text)) for text in texts)

    def all_gather(
        self, topic: str, text: str, *, timeout: float = TIMEOUT_SECONDS
    ) -> tuple[str, ...]:
        """Returns the text of every process, in their order."""
        service, number = self._service, next(self._rounds[topic])
        service.publish(_key(topic, number, service.index), text)
        texts = tuple(
            text
            if other == service.index
            else service.receive(_key(topic, number, other), sender=other, timeout=timeout)
            for other in range(service.count)
        )
        if number:  # all have published in this round, so all have read the previous one
            service.delete(_key(topic, number - 1, service.index))
        return texts


def _key(topic: str, number: int, index: int) -> str:
    return f"gathered/{topic}/{number}/{index}"


@functools.cache
def _coordinator() -> Coordinator:
    # The rounds are counted once per process, whoever asks.
    return Coordinator(joined_service())


def all_processes() -> tuple[Process, ...]:
    """Returns all processes of the job, in order."""
    return _coordinator().processes if is_multiprocess() else (this_process(),)


def all_gather_str(topic: str, text: str, *, timeout: float = TIMEOUT_SECONDS) -> tuple[str, ...]:
    """Returns the text that each process gives for a topic, in their order."""
    if not is_multiprocess():
        return (text,)
    return _coordinator().all_gather(topic, text, timeout=timeout)


def barrier(topic: str, *, timeout: float = TIMEOUT_SECONDS) -> None:
    """Returns when all processes have reached this point."""
    all_gather_str(f"barrier/{topic}", "", timeout=timeout)


def broadcast_from_first(topic: str, make: Callable[[], Value]) -> Value:
    """Returns on every process the JSON value that `make` returns on the one that writes files."""
    if not is_multiprocess():
        return make()
    texts = all_gather_str(topic, json.dumps(make()) if jax.process_index() == 0 else "")
    return json.loads("".join(texts))


@contextmanager
def new_shared_folder(folder: FilePath) -> Iterator[FilePath]:
    """Yields a temporary folder that all processes write into and that then replaces `folder`.

    The first process creates and renames it, as `new_folder` does. Object storage cannot rename:
    there the folder is emptied and written in place, so its completion mark must be written last.
    """
    with ExitStack() as stack:

        def begin() -> str:
            if isinstance(folder, epath.Path):
                if folder.exists():
                    folder.rmtree()
                return os.fspath(folder)
            stack.enter_context(only_writer(folder.parent))
            return os.fspath(stack.enter_context(new_folder(folder)))

        yield as_path(broadcast_from_first("new folder", begin))
        barrier("new folder written")
    barrier("new folder in place")


def gather_host_times(timings: Timings) -> tuple[HostTimes, ...]:
    """Returns the times of every process, in their order."""
    process = this_process()
    mine = HostTimes.of(timings, process=process.index, host=process.host)
    texts = all_gather_str("timings", json.dumps(asdict(mine)))
    return tuple(HostTimes(**json.loads(text)) for text in texts)


# Comparison


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A value of one process that is not the usual one."""

    name: str
    value: Any
    usual: Any
    process: Process

    def as_problem(self) -> Problem:
        """Returns the problem, with long values cut to where they differ."""
        start = _first_shown(repr(self.value), repr(self.usual))
        return Problem(
            name=f"{self.name} on {self.process}",
            value=_shortened(self.value, start),
            rule=f"is {_shortened(self.usual, start)} on the other processes",
            remedy=REMEDY,
        )


def assert_equal_across_processes(topic: str, facts: Mapping[str, object]) -> None:
    """Raises ProblemsFound, on every process alike, for each fact that differs somewhere."""
    found = differences(_gathered(topic, facts), all_processes())
    if found:
        raise ProblemsFound([difference.as_problem() for difference in found])


def assert_same_result(name: str, digest: str) -> None:
    """Raises Diverged, on every process alike, if a result is not the same everywhere."""
    found = differences(_gathered("results", {name: digest}), all_processes())
    if found:
        odd = ", ".join(str(difference.process) for difference in found)
        raise Diverged(
            f"{name} differs on {odd} from the other processes. It was not saved. If this happens "
            "again, test the memory and the devices of that host."
        )


def differences(
    facts_of_processes: Sequence[Mapping[str, object]], processes: Sequence[Process]
) -> list[Difference]:
    """Returns every value that differs from the most common one; of two, the first is usual."""
    found = []
    names = dict.fromkeys(name for facts in facts_of_processes for name in facts)
    for name in names:
        texts = [json.dumps(facts.get(name)) for facts in facts_of_processes]
        usual = Counter(texts).most_common(1)[0][0]
        found += [
            Difference(name=name, value=json.loads(text), usual=json.loads(usual), process=process)
            for text, process in zip(texts, processes, strict=True)
            if text != usual
        ]
    return found


def _gathered(topic: str, facts: Mapping[str, object]) -> list[Mapping[str, object]]:
    return [json.loads(text) for text in all_gather_str(topic, json.dumps(facts))]


def _first_shown(one: str, other: str) -> int:
    """Returns the first character to show of two texts: shortly before they differ, if long."""
    if max(len(one), len(other)) <= SHOWN_CHARACTERS:
        return 0
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return max(0, sum(1 for _ in same) - CHARACTERS_BEFORE)


def _shortened(value: object, start: int) -> object:
    """Returns the value itself if it is short, else the part of its text that is shown."""
    text = repr(value)
    if not start and len(text) <= SHOWN_CHARACTERS:
        return value
    end = start + SHOWN_CHARACTERS
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")


IsPreempted = Callable[[int], bool]
Item = TypeVar("Item")


class Preempted(Exception):
    """The run was asked to stop and has reached a point where it can."""


@contextmanager
def listen_for_preemption() -> Iterator[IsPreempted]:
    """Yields a function that returns whether to stop at a step. Step numbers must rise by one.

    With several processes, a SIGTERM of one stops all of them at the same step.
    """
    if is_multiprocess():
        yield multihost_utils.reached_preemption_sync_point
        return
    received = False

    def on_signal(*_: Any) -> None:
        nonlocal received
        received = True

    try:
        previous = signal.signal(signal.SIGTERM, on_signal)
    except ValueError:  # only the main thread may set signal handlers
        yield lambda step: False
        return
    try:
        yield lambda step: received
    finally:
        signal.signal(signal.SIGTERM, previous)


@final
class Preemption:
    """Numbers the steps of a run, over all of its loops, and stops between two of them."""

    def __init__(self) -> None:
        self._is_preempted: IsPreempted = _never
        self._numbers = itertools.count()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Listens for SIGTERM while the block runs."""
        with listen_for_preemption() as self._is_preempted:
            try:
                yield
            finally:
                self._is_preempted = _never

    def until_preempted(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items. Raises Preempted before the next one if the run has to stop."""
        for item in items:
            if self._is_preempted(next(self._numbers)):
                raise Preempted
            yield item


def _never(step: int) -> bool:
    return False


# jax agrees on a step number, which must rise over all loops of a process.
PREEMPTION = Preemption()

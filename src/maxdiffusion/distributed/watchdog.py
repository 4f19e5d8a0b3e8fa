"""Ends a job on every host when one process fails, dies or hangs, and names that process.

Every process publishes its state through the coordination service:

    heartbeat/<index>   its progress, once a second
    failed/<index>      the error that stopped it
    done/<index>        that it has finished
    diagnosis           the process to blame and why; the first one published counts for all
    exiting/<index>     that it has read the diagnosis. The first process, which runs the service,
                        waits for that before it exits.

The service runs in the first process. If that process dies, jax aborts the others at once, and a
handler of SIGABRT names it. If its host is cut off or it is frozen, a second thread notices that
calls of the service do not return.
"""

import ctypes
import enum
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, final

import jax

from maxdiffusion.distributed.coordination import Process, Service, joined_service
from maxdiffusion.distributed.initialize import Timeouts, is_listening, report_exit
from maxdiffusion.errors import STOPPED
from maxdiffusion.runtime.files import remove_unfinished
from maxdiffusion.runtime.progress import PROGRESS, ProgressSnapshot

HEARTBEAT_SECONDS = 1.0
# An error that all processes share is reported by each of them, given this time.
GRACE_SECONDS = 3.0
_FOLDER = "watchdog"


# Diagnosis


class Fault(enum.Enum):
    """The ways in which a process can end a job."""

    FAILED = "failed"
    DEAD = "dead"
    HUNG = "hung"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The reason that ends a job, with the processes to blame in its text."""

    fault: Fault
    text: str

    def as_json(self) -> str:
        """Returns the form in which it is published."""
        return json.dumps({"fault": self.fault.value, "text": self.text})

    @classmethod
    def from_json(cls, text: str) -> "Diagnosis":
        """Reads what `as_json` wrote."""
        read = json.loads(text)
        return cls(fault=Fault(read["fault"]), text=read["text"])


@dataclass(frozen=True, kw_only=True)
class Received:
    """The last text that a process published on a topic, and when it arrived here."""

    text: str
    arrived: float


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A published state of a process; the count tells it from an equal one before."""

    count: int
    progress: ProgressSnapshot

    def as_json(self) -> str:
        """Returns the form in which it is published."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Heartbeat":
        """Reads what `as_json` wrote."""
        read = json.loads(text)
        return cls(count=read["count"], progress=ProgressSnapshot(**read["progress"]))


def diagnose(
    processes: Sequence[Process],
    heartbeats: Mapping[int, Received],
    failures: Mapping[int, Received],
    *,
    now: float,
    timeouts: Timeouts,
) -> Diagnosis | None:
    """Returns why the job has to end, or None while it can go on."""
    for index, failure in sorted(failures.items()):
        if now - failure.arrived > GRACE_SECONDS:
            return Diagnosis(fault=Fault.FAILED, text=f"{processes[index]} failed: {failure.text}")
    for index, heartbeat in sorted(heartbeats.items()):
        silent = now - heartbeat.arrived
        if silent > timeouts.dead:
            text = (
                f"{processes[index]} sent no heartbeat for {silent:.0f} s (limit "
                f"{timeouts.dead:g} s): it died, or its host is cut off. Last stage: "
                f"{Heartbeat.from_json(heartbeat.text).progress.stage}"
            )
            return Diagnosis(fault=Fault.DEAD, text=text)
    if len(heartbeats) < len(processes):
        return None
    progress = {
        index: Heartbeat.from_json(heartbeat.text).progress
        for index, heartbeat in heartbeats.items()
    }
    return _diagnose_hang(processes, progress, timeouts.hang)


def _diagnose_hang(
    processes: Sequence[Process], progress: Mapping[int, ProgressSnapshot], limit: float
) -> Diagnosis | None:
    """Blames the processes that are furthest behind, if none of them moved for too long."""
    lowest = min(one.number for one in progress.values())
    behind = [index for index, one in progress.items() if one.number == lowest]
    quiet = min(progress[index].quiet_seconds for index in behind)
    if quiet <= limit:
        return None
    stage = progress[behind[0]].stage
    waited = f"{stage!r} for {quiet:.0f} s (hang_timeout_seconds={limit:g})"
    if len(behind) == len(processes):
        return Diagnosis(fault=Fault.HUNG, text=f"all processes hang at {waited}")
    names = ", ".join(str(processes[index]) for index in behind)
    furthest = max(progress.values(), key=lambda one: one.number).stage
    text = f"{names} hangs at {waited}, while others wait at {furthest!r}"
    return Diagnosis(fault=Fault.HUNG, text=text)


# Watchdog


@final
class Watchdog:
    """Threads that publish the state of this process, read the others' and end the job.

    `address` is the coordinator's, where the first process listens while it lives.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        timeouts: Timeouts,
        *,
        address: str,
        service: Service | None = None,
    ):
        self._processes, self._timeouts, self._address = tuple(processes), timeouts, address
        self._service = joined_service() if service is None else service
        self._heartbeats: dict[int, Received] = {}
        self._failures: dict[int, Received] = {}
        self._published = 0
        self._unanswered = 0
        self._over = threading.Event()
        self._exiting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._second = threading.Thread(target=self._watch_service, name="silence", daemon=True)

    def start(self) -> None:
        """Starts the threads. Time before this call does not count as a hang."""
        PROGRESS.heartbeat()
        self._publish_heartbeat()
        before_abort(self._before_abort)
        self._thread.start()
        self._second.start()

    def stop(self) -> None:
        """Stops watching, at the end of a job that succeeded on this process."""
        self._publish("done", "")
        self._over.set()
        self._thread.join()

    def fail(self, reason: str) -> None:
        """Publishes the error of this process, which must exit afterwards."""
        self._over.set()
        self._thread.join(5 * HEARTBEAT_SECONDS)
        self._publish_exit("failed", reason)

    def await_diagnosis(self) -> None:
        """Waits until a dead process would have been found; if there is one, exits here."""
        self._over.wait(self._timeouts.dead + 4 * HEARTBEAT_SECONDS)

    def _run(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            try:
                self._publish_heartbeat()
                diagnosis = self._diagnosis()
            except jax.errors.JaxRuntimeError as error:
                if not self._over.is_set():
                    self._exit_without_service(str(error).splitlines()[0][:200])
                return
            self._unanswered = 0
            if diagnosis is not None and not self._over.is_set():
                self._exit(diagnosis)

    def _watch_service(self) -> None:
        """Exits if calls of the service do not return for as long as a dead process is allowed.

        Counts rounds and not seconds: a process that was frozen itself must blame no other.
        """
        while not self._over.wait(HEARTBEAT_SECONDS):
            self._unanswered += 1
            if self._unanswered * HEARTBEAT_SECONDS > self._timeouts.dead:
                self._exit_without_service(f"no answer for {self._timeouts.dead:g} s")

    def _before_abort(self) -> None:
        """Names the process that made native code abort; returns if it is this process itself."""
        if self._over.is_set():  # it exits already, and has printed why
            time.sleep(2 * HEARTBEAT_SECONDS)
        elif self._service.index and not is_listening(self._address, 2 * HEARTBEAT_SECONDS):
            self._exit_without_service(f"no process listens at {self._address}, so it died")
        else:
            faulthandler.dump_traceback(all_threads=True)
            reason = ("failed", "aborted in native code, see the output of this process")
            # jax may hold a lock of the service here, so this thread must not wait for it.
            publisher = threading.Thread(target=self._publish_exit, args=reason, daemon=True)
            publisher.start()
            publisher.join(10 * HEARTBEAT_SECONDS)

    def _publish(self, topic: str, text: str) -> None:
        self._service.update(f"{_FOLDER}/{topic}/{self._service.index}", text)

    def _publish_heartbeat(self) -> None:
        self._published += 1
        heartbeat = Heartbeat(count=self._published, progress=PROGRESS.snapshot())
        self._publish("heartbeat", heartbeat.as_json())

    def _diagnosis(self) -> Diagnosis | None:
        """Returns the published diagnosis, or publishes one if the job has to end."""
        entries = self._receive()
        if "diagnosis" in entries:
            return Diagnosis.from_json(entries["diagnosis"])
        gone = _by_index(entries, "done").keys() | self._failures.keys()
        diagnosis = diagnose(
            self._processes,
            {index: one for index, one in self._heartbeats.items() if index not in gone},
            self._failures,
            now=time.monotonic(),
            timeouts=self._timeouts,
        )
        return None if diagnosis is None else self._publish_diagnosis(diagnosis)

    def _receive(self) -> dict[str, str]:
        """Reads all entries; keeps heartbeats and failures with the time of their arrival."""
        entries, now = self._service.entries(_FOLDER), time.monotonic()
        for topic, known in (("heartbeat", self._heartbeats), ("failed", self._failures)):
            for index, text in _by_index(entries, topic).items():
                if index not in known or known[index].text != text:
                    known[index] = Received(text=text, arrived=now)
        return entries

    def _publish_diagnosis(self, diagnosis: Diagnosis) -> Diagnosis:
        """Publishes a diagnosis. Returns the one that counts: the first that was published."""
        try:
            self._service.publish(f"{_FOLDER}/diagnosis", diagnosis.as_json())
        except jax.errors.JaxRuntimeError:
            first = self._receive().get("diagnosis")
            return diagnosis if first is None else Diagnosis.from_json(first)
        return diagnosis

    def _exit(self, diagnosis: Diagnosis) -> None:
        """Exits, whatever other threads wait for. The lock lets one thread do it."""
        with self._exiting:
            report_exit(diagnosis.text)
            if diagnosis.fault is Fault.HUNG:
                faulthandler.dump_traceback(all_threads=True)
            self._publish_exit("exiting", "")
            hard_exit(STOPPED)

    def _exit_without_service(self, reason: str) -> None:
        """Exits when the first process neither answers nor can be asked."""
        last = self._heartbeats.get(0)
        stage = "" if last is None else Heartbeat.from_json(last.text).progress.stage
        seen = f". Last stage: {stage}" if stage else ""
        with self._exiting:
            first = f"{self._processes[0]}, which runs the coordination service, does not answer"
            report_exit(f"{first}: {reason}{seen}")
            hard_exit(STOPPED)

    def _publish_exit(self, topic: str, text: str) -> None:
        """Publishes that this process exits; the first one waits for all that still live."""
        try:
            self._publish(topic, text)
            while self._service.index == 0 and self._still_running():
                time.sleep(HEARTBEAT_SECONDS / 4)
        except jax.errors.JaxRuntimeError:
            return  # the first process has gone, and the service with it

    def _still_running(self) -> set[int]:
        """Returns the other processes that send heartbeats and have not begun to exit."""
        entries, now = self._receive(), time.monotonic()
        living = {
            index
            for index, last in self._heartbeats.items()
            if now - last.arrived < self._timeouts.dead
        }
        exiting = (_by_index(entries, topic).keys() for topic in ("exiting", "failed", "done"))
        return (living - {self._service.index}).difference(*exiting)


def _by_index(entries: Mapping[str, str], topic: str) -> dict[int, str]:
    """Returns the texts of a topic by process index."""
    return {
        int(key.rsplit("/", 1)[1]): value
        for key, value in entries.items()
        if key.startswith(f"{topic}/")
    }


# Exits

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
# C keeps only a pointer to a handler, so Python must keep the handler itself.
_handlers: list[Any] = []


def before_abort(action: Callable[[], None]) -> None:
    """Calls `action` when native code calls abort(), on the thread that does; then aborts.

    When the service dies, jax aborts from a thread of its own. Signal handlers of Python run later,
    on the main thread, which is too late.
    """
    handler = _HANDLER(lambda _: action())
    _handlers.append(handler)
    setter = ctypes.CDLL(None).signal
    setter.argtypes, setter.restype = (ctypes.c_int, _HANDLER), ctypes.c_void_p
    setter(signal.SIGABRT, handler)


def hard_exit(code: int) -> NoReturn:
    """Exits at once. A normal exit of jax would wait for processes that have gone."""
    remove_unfinished()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

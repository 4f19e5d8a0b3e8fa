"""Ends the job on every host when one process fails, dies or stands still, and says which.

Every process tells the others how it is through the coordination service:

    beat/<index>     how far it has come, every second or so
    failed/<index>   what stopped it
    done/<index>     that it has nothing left to do
    verdict          the culprit and why, by whoever finds it first; all others end on it
    told/<index>     that it has read the verdict: the first process, where the service lives, waits
                     for that before it ends
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

import jax

from maxdiffusion.runtime.atomic import abandon
from maxdiffusion.runtime.coordination import ROOT, Member, client
from maxdiffusion.runtime.joining import Patience
from maxdiffusion.runtime.marks import MARKS, Mark
from maxdiffusion.runtime.problems import STOPPED

BEAT_SECONDS = 1.0
# An error that all processes share is told by each of them, if they are given the time.
GRACE_SECONDS = 3.0
_HERE = f"{ROOT}/watch"


@dataclass(frozen=True, kw_only=True)
class Word:
    """What was last heard of a process, and when it came."""

    text: str
    arrived: float

    @property
    def mark(self) -> Mark:
        """How far it had come."""
        return Mark(**{name: value for name, value in json.loads(self.text).items() if name != "n"})


def find_culprit(
    members: Sequence[Member],
    beats: Mapping[int, Word],
    failures: Mapping[int, Word],
    *,
    now: float,
    patience: Patience,
) -> str | None:
    """Who ends the job and why, in words; None while all is well."""
    for index, failure in sorted(failures.items()):
        if now - failure.arrived > GRACE_SECONDS:
            return f"{members[index]} failed: {failure.text}"
    for index, beat in sorted(beats.items()):
        if now - beat.arrived > patience.dead:
            return (
                f"{members[index]} gave no sign for {now - beat.arrived:.0f} s (limit "
                f"{patience.dead:g} s): it died, or its host is cut off. Last seen at: "
                f"{beat.mark.stage}"
            )
    return _standing_still(members, beats, patience.hang) if len(beats) == len(members) else None


def _standing_still(
    members: Sequence[Member], beats: Mapping[int, Word], limit: float
) -> str | None:
    """The processes that are furthest behind, if they have not moved for too long."""
    marks = {index: beat.mark for index, beat in beats.items()}
    lowest = min(mark.number for mark in marks.values())
    behind = [index for index, mark in marks.items() if mark.number == lowest]
    quiet = min(marks[index].quiet for index in behind)
    if quiet <= limit:
        return None
    stage = marks[behind[0]].stage
    if len(behind) == len(members):
        return (
            f"all processes stand at {stage!r} for {quiet:.0f} s (hang_timeout_seconds={limit:g})"
        )
    names = ", ".join(str(members[index]) for index in behind)
    further = max(marks.values(), key=lambda mark: mark.number).stage
    return (
        f"{names} hangs at {stage!r} for {quiet:.0f} s (hang_timeout_seconds={limit:g}), while "
        f"others wait at {further!r}"
    )


class Watch:
    """A thread that tells how this process is, hears how the others are, and ends the job."""

    def __init__(self, members: Sequence[Member], patience: Patience):
        self._members, self._patience = tuple(members), patience
        self._mine = jax.process_index()
        self._beats: dict[int, Word] = {}
        self._failures: dict[int, Word] = {}
        self._count = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch, at the end of a job that went well on this process."""
        client().key_value_set(f"{_HERE}/done/{self._mine}", "", allow_overwrite=True)
        self._over.set()
        self._thread.join()

    def fail(self, reason: str) -> None:
        """Tells the others that this process stops, which it should then do."""
        self._over.set()
        self._thread.join(5 * BEAT_SECONDS)
        self._say_farewell("failed", reason)

    def await_verdict(self) -> None:
        """Waits as long as it takes to find a dead process; the job ends here if there is one."""
        self._over.wait(self._patience.dead + 4 * BEAT_SECONDS)

    def _run(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self._beat()
                verdict = self._hear()
            except jax.errors.JaxRuntimeError as error:
                verdict = self._lost(error)
            if verdict is not None and not self._over.is_set():
                self._end(verdict)

    def _beat(self) -> None:
        self._count += 1
        text = json.dumps({"n": self._count, **asdict(MARKS.last())})
        client().key_value_set(f"{_HERE}/beat/{self._mine}", text, allow_overwrite=True)

    def _hear(self) -> str | None:
        """The verdict on the job, if there is one."""
        heard = self._heard()
        if "verdict" in heard:
            return heard["verdict"]
        gone = _indices(heard, "done").keys() | self._failures.keys()
        culprit = find_culprit(
            self._members,
            {index: beat for index, beat in self._beats.items() if index not in gone},
            self._failures,
            now=time.monotonic(),
            patience=self._patience,
        )
        return None if culprit is None else self._judge(culprit)

    def _heard(self) -> dict[str, str]:
        """Everything that was said, of which beats and failures are kept with their time."""
        entries = client().key_value_dir_get(_HERE)
        heard = {key.split(f"{_HERE}/", 1)[1]: value for key, value in entries}
        now = time.monotonic()
        for topic, known in (("beat", self._beats), ("failed", self._failures)):
            for index, text in _indices(heard, topic).items():
                if index not in known or known[index].text != text:
                    known[index] = Word(text=text, arrived=now)
        return heard

    def _judge(self, culprit: str) -> str:
        """Writes the verdict, and returns the one that holds: the first."""
        try:
            client().key_value_set(f"{_HERE}/verdict", culprit)
        except jax.errors.JaxRuntimeError:
            return self._heard().get("verdict", culprit)
        return culprit

    def _lost(self, error: Exception) -> str:
        reason = str(error).splitlines()[0][:200]
        return f"{self._members[0]}, which the job meets at, does not answer: {reason}"

    def _end(self, verdict: str) -> None:
        """Ends this process, whatever its other threads wait for."""
        print(f"stopped: {verdict}", file=sys.stderr, flush=True)
        if "hangs at" in verdict or "stand at" in verdict:
            faulthandler.dump_traceback(all_threads=True)
        self._say_farewell("told", "")
        leave(STOPPED)

    def _say_farewell(self, topic: str, text: str) -> None:
        """Notes how this process ends; the first one stays until all living ones end too."""
        try:
            client().key_value_set(f"{_HERE}/{topic}/{self._mine}", text, allow_overwrite=True)
            while self._mine == 0 and self._untold():
                time.sleep(BEAT_SECONDS / 4)
        except jax.errors.JaxRuntimeError:
            return  # the first process is gone, and nobody is left to be told

    def _untold(self) -> set[int]:
        """The processes that still give signs and have not heard that the job is over."""
        heard, now = self._heard(), time.monotonic()
        living = {i for i, beat in self._beats.items() if now - beat.arrived < self._patience.dead}
        ending = (_indices(heard, topic).keys() for topic in ("told", "failed", "done"))
        return (living - {self._mine}).difference(*ending)


def leave(code: int) -> NoReturn:
    """Ends the process at once: jax's own end would wait for processes that do not come."""
    abandon()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _indices(heard: Mapping[str, str], topic: str) -> dict[int, str]:
    """What each process said on a topic."""
    return {
        int(key.rsplit("/", 1)[1]): value
        for key, value in heard.items()
        if key.startswith(f"{topic}/")
    }

"""Ends the job on every host when one process fails, dies or stands still, and says which.

Every process tells the others how it is through the coordination service:

    beat/<index>     how far it has come, every second or so
    failed/<index>   what stopped it
    done/<index>     that it has nothing left to do
    verdict          the culprit and why, by whoever finds it first; all others end on it
    told/<index>     that it has read the verdict: the first process, where the service lives, waits
                     for that before it ends

The service lives in the first process. If that one dies, jax aborts the others at once, and the
signal of it is heard; if its host is cut off, or it is frozen, a second thread misses its answers.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import NoReturn

import jax

from maxdiffusion.runtime.aborting import before_abort
from maxdiffusion.runtime.atomic import abandon
from maxdiffusion.runtime.coordination import ROOT, Member, client, this_member
from maxdiffusion.runtime.culprits import Word, find_culprit
from maxdiffusion.runtime.joining import Patience, answers
from maxdiffusion.runtime.marks import MARKS
from maxdiffusion.runtime.problems import STOPPED

BEAT_SECONDS = 1.0
_HERE = f"{ROOT}/watch"


class Watch:
    """Threads that tell how this process is, hear how the others are, and end the job.

    `address` is where the job meets: the first process answers there while it lives.
    """

    def __init__(self, members: Sequence[Member], patience: Patience, *, address: str):
        self._members, self._patience, self._address = tuple(members), patience, address
        self._mine = this_member().index
        self._beats: dict[int, Word] = {}
        self._failures: dict[int, Word] = {}
        self._count = 0
        self._unanswered = 0
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._second = threading.Thread(target=self._count_silence, name="silence", daemon=True)

    def start(self) -> None:
        """Begins to watch; what came before does not count as standing still."""
        MARKS.stir()
        self._beat()
        before_abort(self._speak_before_abort)
        self._thread.start()
        self._second.start()

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
                if not self._over.is_set():
                    self._end_alone(str(error).splitlines()[0][:200])
                return
            self._unanswered = 0
            if verdict is not None and not self._over.is_set():
                self._end(verdict)

    def _count_silence(self) -> None:
        """Ends this process if calls of the service do not return for as long as a death takes.

        Beats are counted, not seconds: a process that was itself frozen blames nobody for that.
        """
        while not self._over.wait(BEAT_SECONDS):
            self._unanswered += 1
            if self._unanswered * BEAT_SECONDS > self._patience.dead:
                self._end_alone(f"no word for {self._patience.dead:g} s")

    def _speak_before_abort(self) -> None:
        """Names who makes native code end this process; returns if that is this process itself."""
        if self._over.is_set():  # it ends already, and has said why
            time.sleep(2 * BEAT_SECONDS)
        elif self._mine and not answers(self._address, 2 * BEAT_SECONDS):
            self._end_alone(f"nobody listens at {self._address}, so it died")
        else:
            faulthandler.dump_traceback(all_threads=True)
            farewell = ("failed", "aborted in native code, see what this process printed")
            # jax may hold a lock of the service here, so this thread must not wait for it.
            speaker = threading.Thread(target=self._say_farewell, args=farewell, daemon=True)
            speaker.start()
            speaker.join(10 * BEAT_SECONDS)

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

    def _end(self, verdict: str) -> None:
        """Ends this process, whatever its other threads wait for; of several, one thread does."""
        with self._ending:
            print(f"stopped: {verdict}", file=sys.stderr, flush=True)
            if "hangs at" in verdict or "stand at" in verdict:
                faulthandler.dump_traceback(all_threads=True)
            self._say_farewell("told", "")
            leave(STOPPED)

    def _end_alone(self, reason: str) -> None:
        """Ends this process where the first one can neither judge nor be told."""
        beat = self._beats.get(0)
        seen = "" if beat is None else f". Last seen at: {beat.mark.stage}"
        with self._ending:
            whom = f"{self._members[0]}, which the job meets at, does not answer"
            print(f"stopped: {whom}: {reason}{seen}", file=sys.stderr, flush=True)
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

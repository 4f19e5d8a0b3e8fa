"""How far this process has come, for the watch to compare with the others."""

import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The last stage that was reached: its number and name, and the seconds without any sign."""

    number: int
    stage: str
    quiet: float


class Marks:
    """Counts the stages of a run, which are the same on all processes, in the same order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number, self._stage, self._heard = 0, "start", time.monotonic()

    def reach(self, stage: str) -> None:
        """Notes the next stage; to be called before what the processes do together."""
        with self._lock:
            self._number, self._stage = self._number + 1, stage
            self._heard = time.monotonic()

    def stir(self) -> None:
        """Notes that a long stage goes on, as often as it likes."""
        with self._lock:
            self._heard = time.monotonic()

    def last(self) -> Mark:
        """Where this process stands now."""
        with self._lock:
            quiet = time.monotonic() - self._heard
            return Mark(number=self._number, stage=self._stage, quiet=quiet)


# One process has one run: those who work and the one who watches need the same marks.
MARKS = Marks()

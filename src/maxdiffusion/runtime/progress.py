"""Reports the progress of a run: log messages, progress bars and the stage for the watchdog.

Messages and bars are shown by the first process only, bars only on a terminal. The stage of every
process is published by the watchdog, which compares it with the others.
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

from tqdm import tqdm

LOGGER = "maxdiffusion"


def configure_logging(*, first_process: bool = True) -> None:
    """Writes messages of this package to stdout and warnings to stderr, as plain text.

    Only the first process of a job writes messages; every process writes warnings and errors.
    A later call replaces the handler of an earlier one: the commands call this at their start, and
    again once a process knows its index. The caller gives the index because asking jax for it
    starts the devices.
    """
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.INFO)
    # Libraries such as orbax put handlers of their own on the root logger.
    logger.propagate = False
    for handler in [*logger.handlers]:
        if isinstance(handler, _Console):
            logger.removeHandler(handler)
    logger.addHandler(_Console(first_process=first_process))


class _Console(logging.Handler):
    """Writes to the streams that `sys` has at the time of the message: tests replace them."""

    def __init__(self, *, first_process: bool):
        super().__init__()
        self.addFilter(lambda record: first_process or record.levelno >= logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        try:
            print(self.format(record), file=stream, flush=True)
        except Exception:
            self.handleError(record)


# Stages, compared by the watchdog


@dataclass(frozen=True, kw_only=True)
class ProgressSnapshot:
    """The stage that a process has reached, and the seconds since its last sign of progress."""

    number: int
    stage: str
    quiet_seconds: float


@final
class Progress:
    """Counts the stages of a run. All processes pass the same stages in the same order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number, self._stage, self._last_sign = 0, "start", time.monotonic()

    def checkpoint(self, stage: str) -> None:
        """Starts the next stage. Call it before work that needs all processes."""
        with self._lock:
            self._number, self._stage = self._number + 1, stage
            self._last_sign = time.monotonic()

    def heartbeat(self) -> None:
        """Notes that a long stage makes progress."""
        with self._lock:
            self._last_sign = time.monotonic()

    def snapshot(self) -> ProgressSnapshot:
        """Returns the current stage."""
        with self._lock:
            quiet = time.monotonic() - self._last_sign
            return ProgressSnapshot(number=self._number, stage=self._stage, quiet_seconds=quiet)


# A process has one run; its workers and its watchdog thread share this object.
PROGRESS = Progress()


# Progress bars

Advance = Callable[[], None]
Report = Callable[[int, int], None]

_STEPS = (
    "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_inv_fmt}]"
)
_BYTES = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"


@runtime_checkable
class TextStream(Protocol):
    """A stream that bars are drawn on, such as `sys.stderr` or `io.StringIO`."""

    def write(self, text: str, /) -> object:
        """Writes a part of a line."""

    def flush(self) -> object:
        """Shows all that was written."""

    def isatty(self) -> bool:
        """Returns whether a person looks at it."""
        ...


def draws_bars(stream: TextStream) -> bool:
    """Returns whether bars are drawn: only on a terminal of the first process."""
    import jax  # slow, and a command that only checks its config draws no bars

    return stream.isatty() and jax.process_index() == 0


@contextlib.contextmanager
def steps_bar(
    description: str, total: int, *, unit: str = "step", stream: TextStream | None = None
) -> Iterator[Advance]:
    """Draws a bar of `total` steps. Yields a function to call after each step."""
    stream = sys.stderr if stream is None else stream
    with tqdm(
        desc=description,
        total=total,
        unit=unit,
        file=stream,
        bar_format=_STEPS,
        disable=not draws_bars(stream),
        smoothing=0,  # the mean over all steps: none is slower, since all are compiled before
    ) as bar:
        yield lambda: _advance(bar)


def _advance(bar: tqdm) -> None:
    bar.update()


@contextlib.contextmanager
def bytes_bar(description: str, *, stream: TextStream | None = None) -> Iterator[Report]:
    """Draws a bar of bytes. Yields a function to call with the bytes done and the total."""
    stream = sys.stderr if stream is None else stream
    with tqdm(
        desc=description,
        unit="B",
        unit_scale=True,
        file=stream,
        bar_format=_BYTES,
        disable=not draws_bars(stream),
    ) as bar:
        yield _Bytes(bar)


@final
class _Bytes:
    """Moves a bar. Bytes that arrive are also a sign of progress for the watchdog."""

    def __init__(self, bar: tqdm):
        self._bar, self._done = bar, 0

    def __call__(self, done: int, total: int) -> None:
        if done != self._done:
            PROGRESS.heartbeat()
            self._done = done
        self._bar.total = total
        self._bar.update(done - self._bar.n)

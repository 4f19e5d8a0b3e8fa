"""Programs of requests that were not compiled at the start: compiled while the device loop runs.

    first process   kind of a job, unknown --> order 7 --+
    all processes   agree on orders, compile them in a thread, one after the other, say what is done
    first process   order 7 is done everywhere --> jobs of this kind may be taken

A job whose kind is not compiled stays in the queue, and others pass it. All processes compile the
same orders in the same sequence; compiling itself needs no other process.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

logger = logging.getLogger(__name__)
MOST_KINDS = 64  # until the next start: programs occupy memory of devices and host
Failure = tuple[str, str]
"""Code and message of a kind that cannot be compiled."""
Compile = Callable[[Mapping[str, Any]], None]
"""Compiles all programs of a job with these fields."""
Explain = Callable[[Exception], Failure]


@dataclass(frozen=True, kw_only=True)
class Order:
    """A kind of jobs to compile for: its number, the same on all processes, and the fields."""

    number: int
    fields: Mapping[str, Any]


class BackgroundPrograms:
    """Kinds of jobs, and whether their programs are compiled."""

    def __init__(self, compile_kind: Compile, explain: Explain, wake: Callable[[], None]):
        self._compile, self._explain, self._wake = compile_kind, explain, wake
        self._numbers: dict[Hashable, int] = {}
        self._ready: set[Hashable] = set()
        self._unsent: list[Order] = []
        self._waiting: SimpleQueue[Order] = SimpleQueue()
        self._finished: dict[int, Failure | None] = {}  # on this process
        self._agreed: dict[int, Failure | None] = {}  # on all of them
        self._ordered = 0
        self._thread: threading.Thread | None = None

    def add(self, kind: Hashable) -> None:
        """Notes a kind that is compiled already."""
        self._ready.add(kind)

    def is_ready(self, kind: Hashable) -> bool:
        """Returns whether jobs of this kind can run at once, on all processes."""
        return kind in self._ready or self._agreed.get(self._numbers.get(kind, -1), "") is None

    def failure(self, kind: Hashable) -> Failure | None:
        """Returns why a kind cannot be compiled; None if it can, or is not known yet."""
        if kind not in self._numbers and kind not in self._ready and self._is_full:
            return "too_many_kinds", f"{MOST_KINDS} other kinds of videos were compiled already."
        return self._agreed.get(self._numbers.get(kind, -1))

    @property
    def _is_full(self) -> bool:
        return len(self._numbers) >= MOST_KINDS

    @property
    def is_busy(self) -> bool:
        """Returns whether this process compiles."""
        return len(self._finished) < self._ordered

    def order(self, kind: Hashable, fields: Mapping[str, Any]) -> None:
        """Asks for the programs of a kind, once; the first process calls it."""
        if kind not in self._numbers:
            self._numbers[kind] = len(self._numbers)
            self._unsent.append(Order(number=self._numbers[kind], fields=fields))

    # Agreement

    def say(self) -> dict[str, Any]:
        """Returns what the other processes have to know, as JSON."""
        orders, self._unsent = self._unsent, []
        return {
            "orders": [[order.number, dict(order.fields)] for order in orders],
            "finished": [
                [number, failure]
                for number, failure in [*self._finished.items()]
                if number not in self._agreed
            ],
        }

    def hear(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Takes what all processes said, in the same order on each."""
        for one in said:
            for number, fields in one["orders"]:
                self._begin(Order(number=number, fields=fields))
        finished = [dict(one["finished"]) for one in said]
        everywhere = set(finished[0]).intersection(*finished[1:])
        for number in everywhere:
            failures = [one[number] for one in finished if one[number] is not None]
            self._agreed[number] = tuple(failures[0]) if failures else None

    def _begin(self, order: Order) -> None:
        self._ordered += 1
        self._waiting.put(order)
        if self._thread is None:
            # A daemon: nothing interrupts a compilation, and a server that stops does not wait.
            self._thread = threading.Thread(target=self._run, name="compiling", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            order = self._waiting.get()
            started, failure = time.monotonic(), None
            try:
                self._compile(order.fields)
            except Exception as error:
                failure = self._explain(error)
            seconds = time.monotonic() - started
            logger.info("programs of order %d: %.1f s in the background", order.number, seconds)
            self._finished[order.number] = failure
            self._wake()

"""Programs of requests that were not compiled at the start: compiled while the device loop runs.

    first process   kind of a job, unknown --> order 7 --+
    all processes   agree on orders, compile them in a thread, one after the other, say what is done
    first process   order 7 is done everywhere --> jobs of this kind may be taken

A job whose kind is not compiled stays in the queue, and others pass it. All processes compile the
same orders in the same sequence; compiling itself needs no other process. Above a number of kinds,
an order also names the kind that was not used for the longest time; its programs are freed first.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

logger = logging.getLogger(__name__)
MOST_KINDS = 64  # at a time: programs occupy memory of devices and host
Failure = tuple[str, str]
"""Code and message of a kind that cannot be compiled."""
Compile = Callable[[Mapping[str, Any], set[Hashable]], None]
"""Compiles all programs of a job with these fields, and adds their keys to the set."""
Free = Callable[[Iterable[Hashable]], None]
"""Frees the programs of these keys."""
Explain = Callable[[Exception], Failure]


@dataclass(frozen=True, kw_only=True)
class Order:
    """A kind of jobs to compile for: its number, the same on all processes, and the fields.

    `replaces` is the number of the kind that makes room for it.
    """

    number: int
    fields: Mapping[str, Any]
    replaces: int | None = None


class BackgroundPrograms:
    """Kinds of jobs, and whether their programs are compiled.

    Kinds are known to the first process alone, in order of their last use. The thread that compiles
    also frees programs, so that no program goes while it is asked for.
    """

    def __init__(
        self, compile_kind: Compile, free: Free, explain: Explain, wake: Callable[[], None]
    ):
        self._compile, self._free, self._explain, self._wake = compile_kind, free, explain, wake
        self._numbers: dict[Hashable, int] = {}
        self._ready: set[Hashable] = set()
        self._needed: set[Hashable] = set()  # by the job that runs, or may be taken next
        self._unsent: list[Order] = []
        self._waiting: SimpleQueue[Order] = SimpleQueue()
        self._finished: dict[int, Failure | None] = {}  # on this process
        self._agreed: dict[int, Failure | None] = {}  # on all of them
        self._always: set[Hashable] = set()  # keys of programs that are never freed
        self._keys: dict[int, set[Hashable]] = {}
        self._next = self._ordered = 0
        self._thread: threading.Thread | None = None

    def compile_now(self, kind: Hashable, fields: Mapping[str, Any]) -> None:
        """Compiles a kind in this thread, and keeps it; for the start."""
        self._compile(fields, self._always)
        self._ready.add(kind)

    def is_ready(self, kind: Hashable) -> bool:
        """Returns whether jobs of this kind can run at once, on all processes."""
        return kind in self._ready or self._agreed.get(self._numbers.get(kind, -1), "") is None

    def failure(self, kind: Hashable) -> Failure | None:
        """Returns why a kind cannot be compiled; None if it can, or is not known yet."""
        return self._agreed.get(self._numbers.get(kind, -1))

    @property
    def is_busy(self) -> bool:
        """Returns whether this process compiles."""
        return len(self._finished) < self._ordered

    def order(self, kind: Hashable, fields: Mapping[str, Any]) -> bool:
        """Asks for the programs of a kind, once; the first process calls it.

        Returns False if there is no room yet: all kinds are needed or being compiled.
        """
        if kind in self._numbers:
            self._numbers[kind] = self._numbers.pop(kind)
            return True
        replaces = None
        if len(self._numbers) >= MOST_KINDS:
            oldest = next((one for one in self._numbers if self._may_go(one)), None)
            if oldest is None:
                return False
            replaces = self._numbers.pop(oldest)
        self._numbers[kind] = self._next
        self._unsent.append(Order(number=self._next, fields=fields, replaces=replaces))
        self._next += 1
        return True

    def choose(self) -> None:
        """Notes that no job runs, and that the next ones are chosen."""
        self._needed = set()

    def use(self, kind: Hashable) -> None:
        """Notes that a job of this kind may be taken; it keeps its programs until `run`."""
        self._needed.add(kind)
        if kind in self._numbers:
            self._numbers[kind] = self._numbers.pop(kind)

    def run(self, kind: Hashable) -> None:
        """Notes the kind that runs until `choose`; it keeps its programs."""
        self._needed = {kind}

    def _may_go(self, kind: Hashable) -> bool:
        return self._numbers[kind] in self._agreed and kind not in self._needed

    # Agreement

    def say(self) -> dict[str, Any]:
        """Returns what the other processes have to know, as JSON."""
        orders, self._unsent = self._unsent, []
        return {
            "orders": [asdict(order) for order in orders],
            "finished": [
                [number, failure]
                for number, failure in [*self._finished.items()]
                if number not in self._agreed
            ],
        }

    def hear(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Takes what all processes said, in the same order on each."""
        for one in said:
            for order in one["orders"]:
                self._begin(Order(**order))
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
            self._make_room(order)
            try:
                self._compile(order.fields, self._keys[order.number])
            except Exception as error:
                failure = self._explain(error)
            seconds = time.monotonic() - started
            logger.info("programs of order %d: %.1f s in the background", order.number, seconds)
            self._finished[order.number] = failure
            self._wake()

    def _make_room(self, order: Order) -> None:
        """Frees the programs that only the replaced kind has."""
        self._keys[order.number] = set()
        if order.replaces is not None:
            unused = self._keys.pop(order.replaces) - self._always
            unused = unused.difference(*self._keys.values())
            self._free(unused)
            logger.info("order %d: freed %d programs", order.replaces, len(unused))

"""SIGTERM, the notice of preemption: all processes stop at the same point, with their work kept."""

import itertools
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from jax.experimental import multihost_utils

from maxdiffusion.runtime.coordination import several

Asked = Callable[[int], bool]
Item = TypeVar("Item")


class StopAsked(Exception):
    """The run was asked to end, and is at a point where it can."""


class StopPoints:
    """The points where a run may stop; a process has one run, and passes them in order."""

    def __init__(self) -> None:
        self._asked: Asked = lambda step: False
        self._numbers = itertools.count()

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Hears SIGTERM while the block runs."""
        with asked_to_stop() as self._asked:
            try:
                yield
            finally:
                self._asked = lambda step: False

    def between(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items; raises StopAsked before the first one that is not to come any more."""
        for item in items:
            if self._asked(next(self._numbers)):
                raise StopAsked
            yield item


STOPS = StopPoints()


@contextmanager
def asked_to_stop() -> Iterator[Asked]:
    """A question to ask at every step, with numbers that rise by one: is this where we stop?

    With several processes one that gets SIGTERM tells the others, and all hear yes at one step.
    """
    if several():
        yield multihost_utils.reached_preemption_sync_point
        return
    asked = False

    def note(*_: Any) -> None:
        nonlocal asked
        asked = True

    try:
        before = signal.signal(signal.SIGTERM, note)
    except ValueError:  # only the main thread hears signals
        yield lambda step: False
        return
    try:
        yield lambda step: asked
    finally:
        signal.signal(signal.SIGTERM, before)

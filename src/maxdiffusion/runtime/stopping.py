"""SIGTERM, the notice of preemption: all processes stop at the same point, with their work kept."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jax.experimental import multihost_utils

from maxdiffusion.runtime.coordination import several

Asked = Callable[[int], bool]


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

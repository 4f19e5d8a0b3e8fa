"""Words between the processes of a job, over the service that jax has joined them by.

The service is for a few short texts, not for arrays: those go over the devices' own links. With one
process nothing is sent, and every function answers at once. Words must go round while devices of
some host do not start, so processes are counted as they joined; jax.process_index(), which starts
the devices and may count in another order, says only who writes files.
"""

import functools
import itertools
import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import jax

# The client of the service has no public name; orbax leans on this one too.
from jax._src.distributed import global_state

from maxdiffusion.runtime.problems import RunFailed

ROOT = "maxdiffusion"
# The watch ends a job that stands still long before; this bounds what runs without one.
PATIENCE_SECONDS = 24 * 3600.0
_POLL_MILLISECONDS = 5_000  # a blocked call hears no signal

Value = TypeVar("Value")
_rounds: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


@dataclass(frozen=True, kw_only=True)
class Member:
    """One process of a job, as people find it."""

    index: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.index} (host {self.host}, pid {self.pid})"


class NoAnswer(RunFailed):
    """A process did not say what all were to say."""


def this_member() -> Member:
    """This process."""
    return Member(index=global_state.process_id, host=socket.gethostname(), pid=os.getpid())


@functools.cache
def members() -> tuple[Member, ...]:
    """All processes, in order; they are asked once, and then each must ask."""
    said = exchange("members", json.dumps(asdict(this_member())))
    return tuple(Member(**json.loads(text)) for text in said)


def several() -> bool:
    """Whether the job has more than one process."""
    return global_state.client is not None and global_state.num_processes > 1


def writes_files() -> bool:
    """Whether this is the process that writes the files of the job."""
    return not several() or jax.process_index() == 0


def client() -> Any:
    """jax's client of the service."""
    assert global_state.client is not None, "jax.distributed was not initialised"
    return global_state.client


def exchange(topic: str, text: str, *, patience: float = PATIENCE_SECONDS) -> tuple[str, ...]:
    """What each process says on a topic, in their order; all must call it, equally often."""
    if not several():
        return (text,)
    number, mine = next(_rounds[topic]), global_state.process_id
    client().key_value_set(_key(topic, number, mine), text)
    said = tuple(
        text if other == mine else _wait(_key(topic, number, other), other, patience)
        for other in range(global_state.num_processes)
    )
    if number:  # all have spoken in this round, so all have heard the one before
        client().key_value_delete(_key(topic, number - 1, mine))
    return said


def barrier(topic: str, *, patience: float = PATIENCE_SECONDS) -> None:
    """Returns when all processes have come here."""
    exchange(f"barrier/{topic}", "", patience=patience)


def from_first(topic: str, make: Callable[[], Value]) -> Value:
    """What `make` gives on the first process, on all of them; it must be plain enough for JSON."""
    if not several():
        return make()
    said = exchange(topic, json.dumps(make()) if jax.process_index() == 0 else "")
    return json.loads("".join(said))


def _key(topic: str, number: int, index: int) -> str:
    return f"{ROOT}/said/{topic}/{number}/{index}"


def _wait(key: str, speaker: int, patience: float) -> str:
    """The text of another process, once it is there."""
    ends = time.monotonic() + patience
    while True:
        left = max(1, min(_POLL_MILLISECONDS, int((ends - time.monotonic()) * 1000)))
        try:
            return client().blocking_key_value_get(key, left)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() >= ends:
                raise NoAnswer(f"process {speaker} said nothing for {patience:g} s") from error

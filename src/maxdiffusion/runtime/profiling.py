"""Profiles of a few steps: one xprof trace per process, each in a folder of its own.

A process profiles itself and waits for nobody, so a profile cannot hold up a job. xprof, and
`python -m maxdiffusion.read_profile`, read the folders.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import jax
from etils import epath

from maxdiffusion.runtime.places import copy_folder, is_remote, place

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class ProfilePlan:
    """Where profiles go, how many steps come before them, and how many are in them."""

    folder: str
    skip: int
    steps: int

    def __post_init__(self) -> None:
        for name, value, least in (("skip", self.skip, 0), ("steps", self.steps, 1)):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")

    @property
    def own_folder(self) -> str:
        """The folder of this process."""
        return str(epath.Path(self.folder) / host_folder(jax.process_index()))

    def describe(self) -> str:
        """One line for the start-up plan."""
        first, last = self.skip + 1, self.skip + self.steps
        return f"profile: steps {first} to {last}, to {self.folder}/{host_folder('N')} per process"


def host_folder(process: int | str) -> str:
    """The name of the folder that a process writes to."""
    return f"host_{process}"


class Profiler:
    """Counts the steps of a run, and traces those that its plan asks for; none without a plan."""

    def __init__(self, plan: ProfilePlan | None):
        self._plan = plan
        self._done = 0
        self._tracing: Trace | None = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around one step, which must wait for its own device work."""
        plan = self._plan
        if plan is not None and self._done == plan.skip:
            self._tracing = Trace(plan.own_folder)
        try:
            yield
        except BaseException:
            self.close()
            raise
        self._done += 1
        if plan is not None and self._done == plan.skip + plan.steps:
            self.close()

    def watch(self, steps: Iterable[Item]) -> Iterator[Item]:
        """The items of a loop, each of which is a step; a trace ends with the loop, if not before.

        What comes after the loop (decoding, writing) is not in it.
        """
        iterator, end = iter(steps), object()
        with contextlib.closing(self):
            while True:
                with self.step():
                    item = next(iterator, end)
                if item is end:
                    self._done -= 1  # that was no step
                    return
                yield item  # type: ignore[misc]

    def close(self) -> None:
        """Ends a trace that is still running, and writes it."""
        if self._tracing is not None:
            trace, self._tracing = self._tracing, None
            trace.write()


class Trace:
    """A running trace of this process."""

    def __init__(self, folder: str):
        self._folder = folder
        self._remote = is_remote(folder)
        # The profiler writes files of this machine only.
        self._local = tempfile.mkdtemp(prefix="profile_") if self._remote else folder
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # frames of Python swell a trace and slow what it measures
        jax.profiler.start_trace(self._local, profiler_options=options)

    def write(self) -> None:
        """Ends the trace and writes it to its folder."""
        jax.profiler.stop_trace()
        if self._remote:
            copy_folder(Path(self._local), place(self._folder))
            shutil.rmtree(self._local)

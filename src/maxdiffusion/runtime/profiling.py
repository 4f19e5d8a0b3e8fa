"""Traces a few steps of a run with xprof, one folder per process.

A process traces only itself and does not wait for others, so a profile cannot block a job. xprof
and `python -m maxdiffusion.read_profile` read the folders.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, final

import jax
from etils import epath

from maxdiffusion.runtime.files import as_path, copy_folder, is_object_store

Item = TypeVar("Item")
# The named scope of all collectives between devices; traces count its time as waiting.
COLLECTIVE_SCOPE = "collective"


@dataclass(frozen=True, kw_only=True)
class ProfilePlan:
    """The folder of a profile, the steps to skip before it, and the steps in it."""

    folder: str
    skip: int
    steps: int

    def __post_init__(self) -> None:
        for name, value, least in (("skip", self.skip, 0), ("steps", self.steps, 1)):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")

    @property
    def own_folder(self) -> str:
        """Returns the folder of this process."""
        return str(epath.Path(self.folder) / host_folder(jax.process_index()))

    def describe(self) -> str:
        """Returns a line for the start-up plan."""
        first, last = self.skip + 1, self.skip + self.steps
        return f"profile: steps {first} to {last}, to {self.folder}/{host_folder('N')} per process"


def host_folder(process: int | str) -> str:
    """Returns the name of the folder of a process."""
    return f"host_{process}"


@final
class Profiler:
    """Counts the steps of a run and traces those of its plan, if it has one."""

    def __init__(self, plan: ProfilePlan | None):
        self._plan = plan
        self._done = 0
        self._tracing: Trace | None = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Counts its block as one step. The block must wait for its device work."""
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
        """Yields the items of a loop and counts each as a step. A trace ends with the loop.

        Work after the loop, such as decoding and writing, is not in the trace.
        """
        iterator, end = iter(steps), object()
        with contextlib.closing(self):
            while True:
                with self.step():
                    item = next(iterator, end)
                if item is end:
                    self._done -= 1  # the end of the loop is not a step
                    return
                yield item  # type: ignore[misc]

    def close(self) -> None:
        """Ends and writes a trace that is still running."""
        if self._tracing is not None:
            trace, self._tracing = self._tracing, None
            trace.write()


@final
class Trace:
    """A running trace of this process."""

    def __init__(self, folder: str):
        self._folder = folder
        self._remote = is_object_store(folder)
        # The profiler of jax writes only to a local disk.
        self._local = tempfile.mkdtemp(prefix="profile_") if self._remote else folder
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python frames make traces large and steps slow
        jax.profiler.start_trace(self._local, profiler_options=options)

    def write(self) -> None:
        """Ends the trace and writes it to its folder."""
        jax.profiler.stop_trace()
        if self._remote:
            copy_folder(Path(self._local), as_path(self._folder))
            shutil.rmtree(self._local)

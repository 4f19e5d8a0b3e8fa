"""Measures a run: seconds of each stage, of each denoising step, and of each host."""

import contextlib
import enum
import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar, final

import jax
from etils import epath

from maxdiffusion.runtime.files import FilePath, as_path, copy_folder, is_object_store, replacing

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

    @property
    def unfinished(self) -> bool:
        """True until the steps of the plan were traced."""
        return self._plan is not None and self._done < self._plan.skip + self._plan.steps

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


Values = TypeVar("Values")


class Stage(enum.Enum):
    """A part of a run, with its name in JSON and its label in the summary."""

    LOAD = "load", "Load (checkpoint)"
    COMPILE = "compile", "Compile"
    INFERENCE = "inference", "Inference"
    CONDITIONING = "conditioning", "Conditioning"
    VAE_ENCODE = "vae_encode", "  - VAE Encode"
    DENOISE = "denoise_total", "Denoise Total"
    VAE_DECODE = "vae_decode", "VAE Decode"
    VAE_DECODE_DEVICE = "vae_decode_device", "  - TPU Compute"
    VAE_DECODE_HOST = "vae_decode_host", "  - Host Formatting"

    def __init__(self, key: str, label: str):
        self.key = key
        self.label = label


# The stages that do not contain each other; together they are the whole run.
DISJOINT_STAGES = (Stage.LOAD, Stage.COMPILE, Stage.INFERENCE)
# The phases of the first video, none within another.
PHASES = (Stage.LOAD, Stage.COMPILE, Stage.CONDITIONING, Stage.DENOISE, Stage.VAE_DECODE)
# The layout of the public TIMING SUMMARY, which scripts parse: numbers end in column 30.
_TITLE = "TIMING SUMMARY"
_FRAME = "=" * 50
_RULE = "  " + "─" * 40
_NUMBERS_END = 30


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The duration of one denoising step, with its timestep and expert."""

    index: int
    timestep: float
    expert: str
    seconds: float


@final
class Clock:
    """Waits for device work inside a running stage."""

    def ready(self, values: Values) -> Values:
        """Returns `values` when the devices have computed them."""
        return jax.block_until_ready(values)


@final
class Timings:
    """Collects seconds per stage and per step. Repeated runs of a stage are added up.

    The profiler, if there is one, traces the steps that pass through `watch`.
    """

    def __init__(self, profiler: Profiler | None = None) -> None:
        self._profiler = profiler or Profiler(None)
        self._seconds = dict.fromkeys(Stage, 0.0)
        self._steps: list[StepTime] = []
        self._started = time.perf_counter()
        self._first: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, stage: Stage) -> Iterator[Clock]:
        """Times its block. An outer stage includes its inner ones.

        jax returns before the devices finish: pass results through `Clock.ready` to include them.
        """
        started = time.perf_counter()
        try:
            yield Clock()
        finally:
            self._seconds[stage] += time.perf_counter() - started

    def add_step(self, step: StepTime) -> None:
        """Adds the time of one step."""
        self._steps.append(step)

    def watch(self, steps: Iterable[tuple[Values, StepTime]]) -> Iterator[tuple[Values, StepTime]]:
        """Yields the steps of a loop, records their times and lets the profiler trace them."""
        for values, step in self._profiler.watch(steps):
            self.add_step(step)
            yield values, step

    def mark_first_video(self) -> None:
        """Records the seconds of all phases so far, if no video was there before."""
        if not self._first:
            total = time.perf_counter() - self._started
            phases = {stage.key: self._seconds[stage] for stage in PHASES}
            self._first = {"total": total, **phases, "other": total - sum(phases.values())}

    def first_video(self) -> str:
        """Returns a line with the time to the first video by phase; empty without a video."""
        parts = [f"{name} {seconds:.1f}" for name, seconds in self._first.items()]
        return f"Time to first video, s: {', '.join(parts)}" if parts else ""

    def seconds(self, stage: Stage) -> float:
        """Returns the seconds of a stage so far."""
        return self._seconds[stage]

    @property
    def steps(self) -> tuple[StepTime, ...]:
        """Returns the steps so far."""
        return tuple(self._steps)

    def summary(self) -> str:
        """Returns the block of all stages in the layout of the public TIMING SUMMARY."""
        lines = [_FRAME, f"  {_TITLE}", _FRAME]
        lines += [self._line(stage) for stage in DISJOINT_STAGES]
        lines.append(_RULE)
        lines += [self._line(stage) for stage in Stage if stage not in DISJOINT_STAGES]
        return "\n".join([*lines, _FRAME])

    def _line(self, stage: Stage) -> str:
        label = f"  {stage.label}:"
        return f"{label}{self._seconds[stage]:>{_NUMBERS_END - len(label)}.1f}s"

    def as_json(self, details: Mapping[str, object] | None = None) -> dict[str, object]:
        """Returns the seconds of every stage and step, and `details` of the run."""
        return {
            "seconds": {stage.key: seconds for stage, seconds in self._seconds.items()},
            "steps": [asdict(step) for step in self._steps],
            "first_video": dict(self._first),
            "run": dict(details or {}),
        }

    def write(self, path: FilePath, details: Mapping[str, object] | None = None) -> None:
        """Writes `as_json` to `path`, atomically."""
        text = json.dumps(self.as_json(details), indent=2, ensure_ascii=False)
        with replacing(path) as unfinished:
            unfinished.write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """Seconds of every stage on one process, by the stage's name in JSON."""

    process: int
    host: str
    seconds: dict[str, float]

    @classmethod
    def of(cls, timings: Timings, *, process: int, host: str) -> "HostTimes":
        """Returns the times of this process."""
        seconds = {stage.key: timings.seconds(stage) for stage in Stage}
        return cls(process=process, host=host, seconds=seconds)

    @property
    def total(self) -> float:
        """Seconds of the whole run."""
        return sum(self.seconds[stage.key] for stage in DISJOINT_STAGES)


def slowest(hosts: Sequence[HostTimes]) -> HostTimes:
    """Returns the process that took longest; the first of several."""
    return max(hosts, key=lambda host: host.total)


def describe_hosts(hosts: Sequence[HostTimes]) -> str:
    """Names the slowest process and the stage in which it lost most against the quickest.

    Devices synchronise in every step, so a slow host shows mostly where hosts work alone.
    """
    last = slowest(hosts)
    line = f"  Slowest host: {last.process} ({last.host}), {last.total:.1f}s"
    if len(hosts) == 1:
        return line
    behind = {
        stage: last.seconds[stage.key] - min(host.seconds[stage.key] for host in hosts)
        for stage in DISJOINT_STAGES
    }
    worst = max(behind, key=lambda stage: behind[stage])
    quickest = min(host.total for host in hosts)
    return (
        f"{line} (quickest of {len(hosts)}: {quickest:.1f}s; "
        f"{behind[worst]:.1f}s behind in {worst.label})"
    )

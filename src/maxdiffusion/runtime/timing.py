"""Where the time of a run went: stages that wait for their own device work, and single steps."""

import contextlib
import enum
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import jax

from maxdiffusion.runtime.atomic import replacing
from maxdiffusion.runtime.profiling import Profiler

Values = TypeVar("Values")


class Stage(enum.Enum):
    """A part of a run: its name in JSON, and its label in the summary."""

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


# The form of the public block, which people's scripts read: the numbers end in column 30.
_TITLE = "TIMING SUMMARY"
_FRAME = "=" * 50
_RULE = "  " + "─" * 40
_NUMBERS_END = 30
_BEFORE_RULE = (Stage.LOAD, Stage.COMPILE, Stage.INFERENCE)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One denoising step: which, at what timestep, by which expert, and how long it took."""

    index: int
    timestep: float
    expert: str
    seconds: float


class Clock:
    """What a running stage hands out, to wait for the work that was started in it."""

    def ready(self, values: Values) -> Values:
        """`values`, once the devices have computed them."""
        return jax.block_until_ready(values)


class Timings:
    """Collects seconds per stage and per step; a stage that runs again adds up.

    The steps that it sees pass are those that a profiler traces.
    """

    def __init__(self, profiler: Profiler | None = None) -> None:
        self._profiler = profiler or Profiler(None)
        self._seconds = dict.fromkeys(Stage, 0.0)
        self._steps: list[StepTime] = []

    @contextlib.contextmanager
    def stage(self, stage: Stage) -> Iterator[Clock]:
        """Times what runs inside; stages may be nested, and the outer one includes the inner.

        Device work counts only when it is waited for: pass what the stage makes through `ready`.
        """
        started = time.perf_counter()
        try:
            yield Clock()
        finally:
            self._seconds[stage] += time.perf_counter() - started

    def add_step(self, step: StepTime) -> None:
        """Keeps the time of one step."""
        self._steps.append(step)

    def watch(self, steps: Iterable[tuple[Values, StepTime]]) -> Iterator[tuple[Values, StepTime]]:
        """The steps of a loop, as they come; keeps their times, and has them profiled."""
        for values, step in self._profiler.watch(steps):
            self.add_step(step)
            yield values, step

    def seconds(self, stage: Stage) -> float:
        """How long a stage took so far; 0 if it did not run."""
        return self._seconds[stage]

    @property
    def steps(self) -> tuple[StepTime, ...]:
        """The steps so far."""
        return tuple(self._steps)

    def summary(self) -> str:
        """The block of all stages, in the form of the public TIMING SUMMARY."""
        lines = [_FRAME, f"  {_TITLE}", _FRAME]
        lines += [self._line(stage) for stage in _BEFORE_RULE]
        lines.append(_RULE)
        lines += [self._line(stage) for stage in Stage if stage not in _BEFORE_RULE]
        return "\n".join([*lines, _FRAME])

    def _line(self, stage: Stage) -> str:
        label = f"  {stage.label}:"
        return f"{label}{self._seconds[stage]:>{_NUMBERS_END - len(label)}.1f}s"

    def as_json(self, details: Mapping[str, object] | None = None) -> dict[str, object]:
        """Seconds of every stage, every step, and `details` of the run, ready for json.dump."""
        return {
            "seconds": {stage.key: seconds for stage, seconds in self._seconds.items()},
            "steps": [asdict(step) for step in self._steps],
            "run": dict(details or {}),
        }

    def write(self, path: Path, details: Mapping[str, object] | None = None) -> None:
        """Writes `as_json` to `path`, atomically."""
        text = json.dumps(self.as_json(details), indent=2, ensure_ascii=False)
        with replacing(path) as unfinished:
            unfinished.write_text(text + "\n", encoding="utf-8")

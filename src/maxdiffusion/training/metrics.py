"""Figures of a run: a line of JSON for every step, TensorBoard, and words for a person."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tensorboardX import SummaryWriter

from maxdiffusion.runtime.json_lines import whole_lines
from maxdiffusion.training.flow_matching import BucketLosses


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step computes: video tokens, and TFLOP on each device (see `flops.py`)."""

    tokens: int = 0
    tflops_per_device: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one step said of itself."""

    step: int
    part: str
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    details: Any = None
    work: Work = field(default_factory=Work)

    def as_json(self) -> dict[str, Any]:
        """The figures with plain names, ready for json.dump."""
        work = self.work
        line: dict[str, Any] = {
            "step": self.step,
            "part": self.part,
            "learning/loss": self.loss,
            "learning/gradient_norm": self.gradient_norm,
            "learning/rate": self.learning_rate,
            "perf/step_time_seconds": self.seconds,
            "perf/tokens_per_second": work.tokens / self.seconds,
            "perf/tflops_per_second_per_device": work.tflops_per_device / self.seconds,
        }
        return line | {f"learning/{name}": value for name, value in self.named_details().items()}

    def named_details(self) -> Mapping[str, float]:
        """The details by name: losses by timestep, or the parts of a loss."""
        if isinstance(self.details, BucketLosses):
            return {f"loss_{name}": value for name, value in self.details.means().items()}
        return {name: float(value) for name, value in (self.details or {}).items()}


class MetricsWriter:
    """Writes every step as a line of JSON and to TensorBoard, each if it has a place.

    Lines of steps that are trained again are dropped.
    """

    def __init__(self, path: Path | None, *, tensorboard: Path | None = None):
        self._path = path
        self._tensorboard = tensorboard
        self._file: IO[str] | None = None
        self._board: SummaryWriter | None = None

    def start(self, finished: int) -> None:
        """Opens both for a run that has `finished` steps behind it."""
        if self._tensorboard is not None:
            # The library names files by the second, and a run continued at once would write over.
            self._board = SummaryWriter(
                str(self._tensorboard),
                purge_step=finished + 1,
                filename_suffix=f".{time.time_ns()}",
            )
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in whole_lines(self._path) if line["step"] <= finished]
        self._file = self._path.open("w", encoding="utf-8")
        for line in kept:
            self._write(line)

    def __call__(self, figures: Figures) -> None:
        """Writes one step."""
        line = figures.as_json()
        if self._file is not None:
            self._write(line)
        if self._board is not None:
            for name, value in line.items():
                if "/" in name:
                    self._board.add_scalar(name, value, figures.step)

    def close(self) -> None:
        """Closes both."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

"""Metrics of a run: JSON lines, TensorBoard, and the FLOP count that utilisation refers to."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tensorboardX import SummaryWriter

from maxdiffusion.models.wan import WanTransformerConfig
from maxdiffusion.runtime.files import read_json_lines
from maxdiffusion.training.loss import BucketLosses


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of a step: video tokens, and TFLOP on each device (`FORMULA`)."""

    tokens: int = 0
    tflops_per_device: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Metrics of one step."""

    step: int
    part: str
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    details: Any = None
    work: Work = field(default_factory=Work)

    def as_json(self) -> dict[str, Any]:
        """Returns the metrics by name, ready for json.dump."""
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
        """Returns the details by name: losses by timestep, or the terms of a loss."""
        if isinstance(self.details, BucketLosses):
            return {f"loss_{name}": value for name, value in self.details.means().items()}
        return {name: float(value) for name, value in (self.details or {}).items()}


class MetricsWriter:
    """Writes every step to a file of JSON lines and to TensorBoard, each if it has a path.

    Drops the lines of steps that are trained again.
    """

    def __init__(self, path: Path | None, *, tensorboard: Path | None = None):
        self._path = path
        self._tensorboard = tensorboard
        self._file: IO[str] | None = None
        self._board: SummaryWriter | None = None

    def start(self, finished: int) -> None:
        """Opens both for a run with `finished` steps."""
        if self._tensorboard is not None:
            # The library names files by the second; a run continued within it would overwrite.
            self._board = SummaryWriter(
                str(self._tensorboard),
                purge_step=finished + 1,
                filename_suffix=f".{time.time_ns()}",
            )
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_json_lines(self._path) if line["step"] <= finished]
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


BACKWARD = 2  # a backward pass costs two forward passes
FROZEN_BACKWARD = 1  # without the gradients of weights, which are half of it
FORMULA = (
    "{passes} x forward; per layer and clip: 8 S D^2 + 4 S^2 D (self), 4 S D^2 + 4 T D^2 + 4 S T D "
    "(text), 4 S D M (feed-forward); S tokens, T text rows, D width, M inner width"
)


def forward_flops(config: WanTransformerConfig, tokens: int, text_rows: int) -> float:
    """Returns the FLOP of one forward pass over one clip; a multiply-add counts two."""
    width, inner = config.model_dim, config.ffn_dim
    own = 8 * tokens * width**2 + 4 * tokens**2 * width
    text = 4 * tokens * width**2 + 4 * text_rows * width**2 + 4 * tokens * text_rows * width
    feed_forward = 4 * tokens * width * inner
    patch = 4 * config.in_channels
    ends = 2 * tokens * width * 2 * patch + 2 * text_rows * width * (config.text_dim + width)
    return float(config.layers * (own + text + feed_forward) + ends)


def step_work(
    config: WanTransformerConfig,
    *,
    clips: int,
    tokens: int,
    text_rows: int,
    devices: int,
    backward: int = BACKWARD,
) -> Work:
    """Returns the tokens of a step, and its TFLOP on each device."""
    flops = (1 + backward) * clips * forward_flops(config, tokens, text_rows)
    return Work(tokens=clips * tokens, tflops_per_device=flops / 1e12 / devices)

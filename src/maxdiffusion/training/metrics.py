"""Metrics of a run: JSON lines, TensorBoard, and the FLOP count that utilisation refers to.

metrics_file              a line for each step
*.events.jsonl next to it a line for each evaluation, sample video and warning
tensorboard_dir           both, sample videos as animations
"""

import io
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image
from tensorboardX import SummaryWriter
from tensorboardX.proto.summary_pb2 import Summary

from maxdiffusion.costs.chips import CHIPS
from maxdiffusion.kernels.tpu import CHIP_NAMES
from maxdiffusion.models.wan import WanTransformerConfig
from maxdiffusion.runtime.files import read_json_lines
from maxdiffusion.runtime.video import to_bytes
from maxdiffusion.training.loss import BucketLosses


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of a step: video tokens, and TFLOP on each device (`FORMULA`).

    `peak_tflops` is the stated bfloat16 peak of a device, None where none is stated.
    """

    tokens: int = 0
    tflops_per_device: float = 0.0
    peak_tflops: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """A sample video: the step, the file, frames [F Y X 3] and their rate."""

    step: int
    file: str
    frames: np.ndarray = field(repr=False)
    fps: float


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
    gradient_norms: Mapping[str, float] = field(default_factory=dict)

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
        if work.peak_tflops is not None:
            line["perf/mfu"] = work.tflops_per_device / self.seconds / work.peak_tflops
        line |= {f"gradient_norm/{name}": value for name, value in self.gradient_norms.items()}
        return line | {f"learning/{name}": value for name, value in self.named_details().items()}

    def named_details(self) -> Mapping[str, float]:
        """Returns the details by name: losses by timestep, or the terms of a loss."""
        if isinstance(self.details, BucketLosses):
            return {f"loss_{name}": value for name, value in self.details.means().items()}
        return {name: float(value) for name, value in (self.details or {}).items()}


def events_file(metrics: Path) -> Path:
    """Returns the file of evaluations, samples and warnings that belongs to a file of metrics."""
    return metrics.with_suffix(".events.jsonl")


class MetricsWriter:
    """Writes every step to a file of JSON lines and to TensorBoard, each if it has a path.

    Drops the lines of steps that are trained again.
    """

    def __init__(self, path: Path | None, *, tensorboard: Path | None = None):
        self._path = path
        self._tensorboard = tensorboard
        self._files: dict[Path, IO[str]] = {}
        self._board: SummaryWriter | None = None

    @property
    def path(self) -> Path | None:
        """The file of the steps."""
        return self._path

    def start(self, finished: int) -> None:
        """Opens all files for a run with `finished` steps."""
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
        for file in (self._path, events_file(self._path)):
            kept = [line for line in read_json_lines(file) if line["step"] <= finished]
            self._files[file] = file.open("w", encoding="utf-8")
            for line in kept:
                self._write(file, line)

    def __call__(self, figures: Figures) -> None:
        """Writes one step."""
        line = figures.as_json()
        if self._path is not None:
            self._write(self._path, line)
        named = {name: value for name, value in line.items() if "/" in name}
        named[f"learning/loss/{figures.part or 'all'}"] = figures.loss
        self._add_scalars(named, figures.step)

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        """Writes the losses of an evaluation, by names such as `eval/loss`."""
        self._add_event({"step": step, **losses})
        self._add_scalars(losses, step)

    def warned(self, step: int, text: str) -> None:
        """Writes a warning."""
        self._add_event({"step": step, "warning": text})
        if self._board is not None:
            self._board.add_text("warning", text, step)

    def sampled(self, sample: Sample) -> None:
        """Writes the path of a sample video; TensorBoard gets the video itself."""
        self._add_event({"step": sample.step, "sample": sample.file})
        if self._board is not None and self._board.file_writer is not None:
            image = animation(sample.frames, sample.fps)
            summary = Summary(value=[Summary.Value(tag="sample", image=image)])
            self._board.file_writer.add_summary(summary, sample.step)
            self._board.flush()

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            file.close()
        if self._board is not None:
            self._board.close()

    def _add_event(self, line: Mapping[str, Any]) -> None:
        if self._path is not None:
            self._write(events_file(self._path), line)

    def _add_scalars(self, named: Mapping[str, float], step: int) -> None:
        if self._board is not None:
            for name, value in named.items():
                self._board.add_scalar(name, value, step)

    def _write(self, file: Path, line: Mapping[str, Any]) -> None:
        self._files[file].write(json.dumps(line) + "\n")
        self._files[file].flush()


def animation(frames: np.ndarray, fps: float) -> Summary.Image:
    """Returns frames [F Y X 3], bytes or floats in 0..1, as the animated GIF TensorBoard shows."""
    pictures = [Image.fromarray(to_bytes(frame)) for frame in frames]
    stream = io.BytesIO()
    # In hundredths of a second, the unit of the format; browsers slow down anything below 2.
    hundredths = max(2, round(100 / fps))
    pictures[0].save(
        stream,
        format="GIF",
        save_all=True,
        append_images=pictures[1:],
        duration=10 * hundredths,
        loop=0,
    )
    height, width = frames.shape[1:3]
    return Summary.Image(
        height=height, width=width, colorspace=3, encoded_image_string=stream.getvalue()
    )


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
    device_kind: str = "",
) -> Work:
    """Returns the tokens of a step, its TFLOP on each device, and the peak of such a device."""
    flops = (1 + backward) * clips * forward_flops(config, tokens, text_rows)
    return Work(
        tokens=clips * tokens,
        tflops_per_device=flops / 1e12 / devices,
        peak_tflops=stated_peak(device_kind),
    )


def stated_peak(device_kind: str) -> float | None:
    """Returns the bfloat16 peak in TFLOP/s that is stated for a device, or None."""
    chip = CHIP_NAMES.get(device_kind.lower())
    return None if chip is None else CHIPS[chip].bf16_flops / 1e12


def describe_utilisation(device_kind: str, passes: int) -> str:
    """Returns the line of the start-up report on TFLOP/s and MFU, with the denominator."""
    counted = f"TFLOP/s count {FORMULA.format(passes=passes)}"
    peak = stated_peak(device_kind)
    if peak is None:
        return f"{counted}; no MFU, as no peak is stated for {device_kind}"
    return f"{counted}; MFU is their share of {peak:g} TFLOP/s, the bfloat16 peak of a device"

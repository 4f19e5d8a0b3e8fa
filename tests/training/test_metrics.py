"""Figures are lines of JSON, once for every step, also after a run was continued."""

import io
import json
import struct
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto.event_pb2 import Event

from maxdiffusion.models.wan.config import wan_14b
from maxdiffusion.training.loss import BucketLosses
from maxdiffusion.training.metrics import (
    Figures,
    MetricsWriter,
    Sample,
    Work,
    describe_utilisation,
    events_file,
    forward_flops,
    stated_peak,
    step_work,
)


def figures(step):
    losses = BucketLosses.of(jnp.array([1.0, 3.0]), jnp.array([0.3, 0.31]))
    return Figures(
        step=step,
        part="transformer",
        loss=2.0,
        gradient_norm=0.5,
        learning_rate=1e-3,
        seconds=0.5,
        details=losses,
        work=Work(tokens=100, tflops_per_device=0.25),
    )


def test_a_continued_run_has_every_step_once(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    for finished, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        writer = MetricsWriter(path, tensorboard=tmp_path / "board")
        writer.start(finished)
        for step in steps:
            writer(figures(step))
        writer.close()
        path.write_text(path.read_text() + '{"step": 9, "cut')  # as a killed process leaves it
    lines = written_whole(path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["perf/tokens_per_second"] == 200
    assert lines[0]["perf/tflops_per_second_per_device"] == 0.5
    assert lines[0]["learning/loss_250-375"] == 2.0
    assert len(list((tmp_path / "board").iterdir())) == 2


def test_evaluations_samples_and_warnings_are_events(tmp_path):
    path, board = tmp_path / "metrics.jsonl", tmp_path / "board"
    frames = np.random.default_rng(0).integers(0, 255, (5, 16, 32, 3), dtype=np.uint8)
    writer = MetricsWriter(path, tensorboard=board)
    writer.start(0)
    writer(figures(1))
    writer.evaluated(1, {"eval/loss": 0.5})
    writer.sampled(Sample(step=1, file="a.mp4", frames=frames, fps=8))
    writer.warned(1, "the loss rises")
    writer.close()
    assert written_whole(events_file(path)) == [
        {"step": 1, "eval/loss": 0.5},
        {"step": 1, "sample": "a.mp4"},
        {"step": 1, "warning": "the loss rises"},
    ]
    (file,) = board.iterdir()
    values = {value.tag: value for event in board_events(file) for value in event.summary.value}
    assert {"learning/loss", "learning/loss/transformer", "eval/loss"} <= values.keys()
    with Image.open(io.BytesIO(values["sample"].image.encoded_image_string)) as shown:
        assert (shown.n_frames, shown.size) == (5, (32, 16))
        assert shown.info["duration"] == 120  # 1/8 s in hundredths, the unit of the format


def board_events(file):
    """The events of a file of TensorBoard, which is in the format of tfrecord."""
    content, at = file.read_bytes(), 0
    while at < len(content):
        (length,) = struct.unpack("<Q", content[at : at + 8])
        yield Event.FromString(content[at + 12 : at + 12 + length])
        at += 16 + length


def test_utilisation_is_a_share_of_the_stated_peak():
    assert "perf/mfu" not in figures(1).as_json()
    assert "no MFU, as no peak is stated for cpu" in describe_utilisation("cpu", 3)
    assert "MFU is their share of 918 TFLOP/s" in describe_utilisation("TPU v6 lite", 3)
    work = Work(tokens=100, tflops_per_device=459.0, peak_tflops=stated_peak("TPU v6 lite"))
    assert replace(figures(1), work=work).as_json()["perf/mfu"] == 1.0  # in half a second


def written_whole(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def test_nothing_is_written_without_a_place(tmp_path):
    writer = MetricsWriter(None)
    writer.start(0)
    writer(figures(1))
    writer.close()
    assert not [*tmp_path.iterdir()]


def test_work_counts_what_a_step_computes():
    # 75,600 tokens of 720p: attention alone is 4 x 40 layers x S^2 x 5120.
    config, tokens = wan_14b(), 75_600
    attention = 4 * 40 * tokens**2 * 5120
    assert attention < forward_flops(config, tokens, 512) < 2 * attention
    work = step_work(config, clips=8, tokens=tokens, text_rows=512, devices=8)
    assert work.tflops_per_device == pytest.approx(3 * forward_flops(config, tokens, 512) / 1e12)
    # Published for a quarter of a clip per device: 4,893 TFLOP a step, by nearly the same count.
    assert work.tflops_per_device / 4 == pytest.approx(4893, rel=0.03)

"""Figures are lines of JSON, once for every step, also after a run was continued."""

import json

import jax.numpy as jnp
import pytest

from maxdiffusion.models.wan.config import wan_14b
from maxdiffusion.training.loss import BucketLosses
from maxdiffusion.training.metrics import Figures, MetricsWriter, Work, forward_flops, step_work


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

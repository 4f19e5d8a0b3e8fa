"""Stages, the summary block and its JSON."""

import json
import re
import time

import jax
import jax.numpy as jnp
import pytest

from maxdiffusion.runtime.timing import Stage, StepTime, Timings

SUMMARY = """\
==================================================
  TIMING SUMMARY
==================================================
  Load (checkpoint):     585.3s
  Compile:               144.3s
  Inference:             116.0s
  ────────────────────────────────────────
  Conditioning:            3.9s
    - VAE Encode:          0.0s
  Denoise Total:         109.8s
  VAE Decode:              2.2s
    - TPU Compute:         1.7s
    - Host Formatting:     0.5s
=================================================="""
SECONDS = {
    Stage.LOAD: 585.3,
    Stage.COMPILE: 144.3,
    Stage.INFERENCE: 116.0,
    Stage.CONDITIONING: 3.9,
    Stage.DENOISE: 109.8,
    Stage.VAE_DECODE: 2.2,
    Stage.VAE_DECODE_DEVICE: 1.7,
    Stage.VAE_DECODE_HOST: 0.5,
}


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests move by hand."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def move(seconds):
        now[0] += seconds

    return move


@pytest.fixture
def timings(clock):
    collected = Timings()
    for stage, seconds in SECONDS.items():
        with collected.stage(stage):
            clock(seconds)
    return collected


def test_the_summary_has_the_public_form(timings):
    assert timings.summary() == SUMMARY


def test_every_number_can_be_read_by_a_script(timings):
    read = dict(re.findall(r"^[ -]*(\S.*?): +([\d.]+)s$", timings.summary(), re.MULTILINE))
    assert len(read) == len(Stage)
    assert float(read["Denoise Total"]) == 109.8


def test_stages_nest_and_add_up(clock):
    timings = Timings()
    for _ in range(2):
        with timings.stage(Stage.VAE_DECODE):
            with timings.stage(Stage.VAE_DECODE_DEVICE):
                clock(2)
            with timings.stage(Stage.VAE_DECODE_HOST):
                clock(1)
    assert timings.seconds(Stage.VAE_DECODE) == pytest.approx(6)
    assert timings.seconds(Stage.VAE_DECODE_DEVICE) == pytest.approx(4)
    assert timings.seconds(Stage.VAE_DECODE_HOST) == pytest.approx(2)
    assert timings.seconds(Stage.LOAD) == 0


def test_a_failed_stage_still_counts(clock):
    timings = Timings()

    def fail():
        with timings.stage(Stage.DENOISE):
            clock(3)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        fail()
    assert timings.seconds(Stage.DENOISE) == pytest.approx(3)


def test_a_stage_waits_for_its_device_work():
    def slow(x):
        time.sleep(0.3)
        return x

    program = jax.jit(lambda x: jax.pure_callback(slow, jax.ShapeDtypeStruct((), jnp.float32), x))
    x = jnp.float32(1.0)
    timings = Timings()
    with timings.stage(Stage.DENOISE) as stage:
        y = stage.ready({"y": program(x)})["y"]
    assert timings.seconds(Stage.DENOISE) >= 0.3
    assert y == 1


def test_json_holds_stages_steps_and_details(timings, tmp_path):
    for index in range(2):
        timings.add_step(StepTime(index=index, timestep=999.0, expert="high", seconds=2.5))
    assert len(timings.steps) == 2
    timings.write(tmp_path / "out" / "timing.json", {"prompt": "猫", "steps": 2})
    written = json.loads((tmp_path / "out" / "timing.json").read_text(encoding="utf-8"))
    assert written["seconds"]["load"] == pytest.approx(585.3)
    assert set(written["seconds"]) == {stage.key for stage in Stage}
    assert written["steps"][1] == {"index": 1, "timestep": 999.0, "expert": "high", "seconds": 2.5}
    assert written["run"] == {"prompt": "猫", "steps": 2}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["timing.json"]


def test_the_first_video_has_its_phases(clock):
    timings = Timings()
    assert timings.first_video() == ""
    for stage, seconds in ((Stage.LOAD, 3), (Stage.DENOISE, 5)):
        with timings.stage(stage):
            clock(seconds)
    clock(1)
    timings.mark_first_video()
    clock(7)
    timings.mark_first_video()
    assert timings.first_video() == (
        "Time to first video, s: total 9.0, load 3.0, compile 0.0, conditioning 0.0, "
        "denoise_total 5.0, vae_decode 0.0, other 1.0"
    )
    assert timings.as_json()["first_video"]["total"] == pytest.approx(9)


def test_details_that_are_no_json_leave_no_file(timings, tmp_path):
    with pytest.raises(TypeError):
        timings.write(tmp_path / "timing.json", {"bad": object()})
    assert list(tmp_path.iterdir()) == []

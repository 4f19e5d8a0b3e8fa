"""Runs next to predictions: only those of the same job, at its clock, with the part that is off."""

import copy
import json
import re

import pytest

from maxdiffusion.costs.predictions import (
    COLLECTIVES,
    DECODE,
    REST,
    SELF,
    STEP,
    TEXT,
    Prediction,
    describe,
    parts_of,
    read_predictions,
)
from maxdiffusion.errors import ProblemsFound

PIN = "--xla_tpu_dvfs_p_state=7"
JOB = {
    "device_kind": "TPU7x",
    "devices": 8,
    "mesh": {"data": 2, "fsdp": 1, "ring": 2, "ulysses": 2, "tensor": 1},
    "attention": "ulysses_ring_custom",
    "tokens": 75600,
    "model_batch": 2,
    "layers": 40,
    "model_dim": 5120,
    "libtpu_flags": PIN,
}
REPORT = {
    "job": JOB,
    "clock_hz": 2.0e9,
    "peak_clock_hz": 2.0e9,
    "unpinned_clock_hz": 1.6e9,
    "peak_clock_seconds": {"kernel: a": 1.6, "kernel: b": 0.2, "projections": 0.1, "norms": 0.1},
    "unpinned_seconds": {"kernel: a": 2.0, "kernel: b": 0.25, "projections": 0.25},
    "kernels": [
        {"name": "a", "purpose": "self-attention"},
        {"name": "b", "purpose": "cross-attention"},
    ],
    "seconds_of_programs": {"decode": {"seconds_per_run": 0.8, "runs": 1, "seconds": 0.8}},
}
SCOPES = {
    "blocks/self_attention/kernel/a": 2.0,
    "blocks/cross_attention/kernel": 0.2,
    "blocks/self_attention/collective": 0.05,
    "blocks/ffn/mlp": 0.15,
    "(no scope)": 0.05,
}


def line(seconds, **changes):
    """A line of scripts/bench_attention.py."""
    facts = {**JOB, "attention": "ulysses_ring_custom:2x2", "videos": 1, "refusal": ""}
    return {**facts, "seconds_per_step": seconds, **changes}


@pytest.fixture
def write(tmp_path):
    def written(content, name="run.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return written


def test_a_step_that_was_met(write):
    text = describe([write({"bench": [line(2.1)]}), write(REPORT, "report.json")])
    assert "8 x TPU7x, ulysses_ring_custom, clock pinned; prediction: report.json" in text
    assert "The step is predicted within 10% (-4.8%)" in text
    assert "<--" not in text


def test_the_clock_of_the_run_counts(write):
    """The same seconds are 25 % too slow for a pinned clock, and right for one that is not."""
    unpinned = line(2.5, libtpu_flags="--xla_a=1")
    run = write("\n".join(map(json.dumps, [line(2.5), unpinned])), "steps.jsonl")
    pinned, other = describe([run, write(REPORT, "report.json")]).split("\n\n")
    assert "The model is WRONG for this step: its prediction is off by -20.0%" in pinned
    assert "clock not pinned" in other
    assert "within 10% (+0.0%)" in other


def test_a_profile_says_which_part_is_wrong(write):
    run = write({"bench": [line(2.5, scopes=SCOPES)]})
    text = describe([run, write(REPORT, "report.json")])
    assert "Largest difference of a part: self-attention kernel, +400.0 ms of a step." in text
    assert "the device ran nothing: 50.0 ms" in text
    rows = {row.split("  ")[2].strip(): row for row in text.splitlines()[2:7]}
    assert "<--" in rows[SELF]
    assert "<--" not in rows[TEXT] + rows[REST]
    assert "not predicted" in rows[COLLECTIVES]


def test_scopes_are_grouped_as_predictions_are():
    wanted = {SELF: 2.0, TEXT: 0.2, COLLECTIVES: 0.05, REST: 0.2}
    assert parts_of(SCOPES) == pytest.approx(wanted)
    parts = Prediction.of("x", REPORT).parts
    assert {name: pair[0] for name, pair in parts.items()} == pytest.approx(
        {SELF: 1.6, TEXT: 0.2, COLLECTIVES: 0.0, REST: 0.2}
    )


def test_decoding_takes_its_cycles_at_any_clock():
    assert Prediction.of("x", REPORT).seconds[DECODE] == pytest.approx((0.8, 1.0))
    slow = {**REPORT, "clock_hz": 1.6e9}
    slow["seconds_of_programs"] = {"decode": {"seconds_per_run": 1.0}}
    assert Prediction.of("x", slow).seconds[DECODE] == pytest.approx((0.8, 1.0))


def test_a_chip_without_unpinned_figures_has_one_prediction():
    report = {**REPORT, "unpinned_clock_hz": None, "unpinned_seconds": None}
    assert Prediction.of("v6e", report).seconds[STEP] == pytest.approx((2.0, 2.0))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device_kind": "TPU v6 lite"}, "device_kind is 'TPU v6 lite', predicted for 'TPU7x'"),
        ({"tokens": 32760}, "tokens is 32760, predicted for 75600"),
        ({"attention": "flash"}, "attention is 'flash'"),
    ],
)
def test_another_job_is_not_compared(write, changes, said):
    paths = [write({"bench": [line(2.0, **changes)]}), write(REPORT, "report.json")]
    with pytest.raises(ProblemsFound, match=re.escape(said)):
        describe(paths)


def test_jobs_without_a_prediction_do_not_hide_the_others(write):
    run = write({"bench": [line(2.0), line(2.0, tokens=1)]})
    text = describe([run, write(REPORT, "report.json")])
    assert "within 10%" in text
    assert "not compared: " in text


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"bench": []}', '{"steps": []}'])
def test_other_files_are_refused(write, content):
    with pytest.raises(ProblemsFound, match=r"^RUN="):
        describe([write(content), write(REPORT, "report.json")])


def test_a_file_that_is_no_report_is_refused(write):
    with pytest.raises(ProblemsFound, match="is no report of preflight_wan"):
        describe([write({"bench": [line(2.0)]}), write({"job": {}}, "report.json")])


def test_published_predictions_can_be_compared(write):
    """A run that took exactly what is published agrees with it."""
    for prediction in read_predictions(None):
        flags = {"libtpu_flags": PIN if prediction.job["device_kind"] == "TPU7x" else ""}
        took = prediction.seconds[STEP][0]
        exact = {**line(took), **copy.deepcopy(dict(prediction.job)), **flags}
        assert "(+0.0%)" in describe([write({"bench": [exact]})])

"""The report is one file that stands alone and shows what the run wrote."""

import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from maxdiffusion.runtime.video import write_video
from maxdiffusion.training.metrics import events_file
from maxdiffusion.training.watch.charts import Axis, Line, line_chart
from maxdiffusion.training.watch.report import write_report


def line(step, part="transformer", **more):
    return {
        "step": step,
        "part": part,
        "learning/loss": 1 / step,
        "learning/gradient_norm": 0.5,
        "learning/rate": 1e-4,
        "perf/step_time_seconds": 2.0,
        "perf/tokens_per_second": 1000.0,
        "perf/tflops_per_second_per_device": 0.0,
        "learning/loss_0-125": 0.1,
        "learning/loss_125-250": 0.2,
        **more,
    }


def written(tmp_path, steps, events):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(one) + "\n" for one in steps))
    events_file(metrics).write_text("".join(json.dumps(one) + "\n" for one in events))
    return metrics


def test_a_report_shows_experts_buckets_evaluation_samples_and_warnings(tmp_path):
    video = tmp_path / "step_000004.mp4"
    write_video(video, np.zeros((2, 16, 16, 3), np.uint8), fps=8)
    steps = [line(n, "transformer" if n % 2 else "transformer_2") for n in range(1, 801)]
    events = [
        {"step": 4, "eval/loss": 0.5, "eval/loss/transformer_2": 0.4, "eval/loss_0-125": 0.3},
        {"step": 4, "sample": str(video)},
        {"step": 5, "sample": str(tmp_path / "removed.mp4")},
        {"step": 6, "warning": "the loss <rises>"},
    ]
    target = write_report(written(tmp_path, steps, events), about="mesh: data 8", ended="stopped")
    assert target == tmp_path / "metrics.html"
    page = target.read_text()
    for text in (
        "Training, 800 steps",
        "loss of transformer_2",
        "held-out loss, first and last",
        "Loss by timestep",
        "Held-out loss by timestep",
        "the loss &lt;rises&gt;",
        "mesh: data 8",
        "stopped",
        "removed.mp4",
        "data:video/mp4;base64,",
    ):
        assert text in page, text
    assert "<script" not in page
    assert "http" not in page
    assert page.count("<svg") == page.count("</svg>") == 8
    assert page.index(">0-125<") < page.index(">125-250<")


def test_a_run_without_a_step_has_a_report(tmp_path):
    target = write_report(tmp_path / "metrics.jsonl")
    assert "Training, 0 steps" in target.read_text()


def test_a_chart_is_valid_svg_with_lines_inside_its_frame():
    steps = np.arange(1, 5001, dtype=float)
    lines = [
        Line(label=label, steps=steps, values=np.exp(-steps / scale))
        for label, scale in (("a & b", 1000), ("c", 4000))
    ]
    chart = line_chart("Loss", lines, logarithmic=True)
    svg = ElementTree.fromstring(chart[chart.index("<svg") :])
    found = svg.findall("polyline")
    assert len(found) == 2
    assert "a &amp; b" in chart
    points = [tuple(map(float, p.split(","))) for one in found for p in one.get("points").split()]
    assert len(points) == 600
    assert all(0 <= x <= 640 and 0 <= y <= 260 for x, y in points)
    labels = [float(text.text) for text in svg.findall("text")]
    assert {0.01, 0.1} <= {*labels}


@pytest.mark.parametrize(
    ("low", "high", "logarithmic", "expected"),
    [
        (0.0, 10.0, False, [0, 2, 4, 6, 8, 10]),
        (0.9, 2.2, False, [1.0, 1.5, 2.0]),
        (0.09, 1.1, True, [0.1, 0.2, 0.5, 1.0]),
        (1e-9, 1.0, True, [1e-8, 1e-6, 1e-4, 1e-2, 1]),
    ],
)
def test_ticks_are_round_numbers(low, high, logarithmic, expected):
    axis = Axis(low=low, high=high, start=0, end=100, logarithmic=logarithmic)
    np.testing.assert_allclose(axis.ticks(), expected)


def test_a_line_without_points_is_refused():
    with pytest.raises(ValueError, match="as many values as steps"):
        Line(label="a", steps=np.zeros(0), values=np.zeros(0))

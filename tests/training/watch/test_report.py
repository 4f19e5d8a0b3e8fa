"""The report is one file that stands alone and shows what the run wrote."""

import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from maxdiffusion.runtime.video import write_video
from maxdiffusion.training.metrics import events_file
from maxdiffusion.training.watch.charts import Curve, curve_chart
from maxdiffusion.training.watch.report import write_report

SVG = "{http://www.w3.org/2000/svg}"


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
    assert not re.findall(r'(?:href|src)="?http', page)
    assert page.count("<svg") == page.count("</svg>") == 8
    assert page.index(">0-125<") < page.index(">125-250<")


def test_a_run_without_a_step_has_a_report(tmp_path):
    target = write_report(tmp_path / "metrics.jsonl")
    assert "Training, 0 steps" in target.read_text()


def test_a_report_without_matplotlib_has_its_table_and_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    page = write_report(written(tmp_path, [line(1), line(2)], [])).read_text()
    assert "median seconds of a step" in page
    assert "maxdiffusion[plots]" in page
    assert "<svg" not in page


def test_a_chart_is_valid_svg_with_every_curve_and_its_label():
    steps = np.arange(1, 5001, dtype=float)
    curves = [
        Curve(label=label, steps=steps, values=np.exp(-steps / scale) + 0.1 * (steps % 2))
        for label, scale in (("a & b", 1000), ("c", 4000))
    ]
    chart = curve_chart(curves, logarithmic=True)
    svg = ElementTree.fromstring(chart)
    assert {"a & b", "c", "step"} <= {"".join(text.itertext()) for text in svg.iter(f"{SVG}text")}
    shapes = [*svg.iter(f"{SVG}path"), *svg.iter(f"{SVG}use")]
    colours = [shape.get("style") or "" for shape in shapes]
    for colour in ("#0072b2", "#e69f00"):  # the band, the means and their entry of the legend
        assert sum(colour in style for style in colours) == 3
    assert curve_chart(curves, logarithmic=True) == chart


def test_a_curve_of_many_points_is_drawn_as_means_within_their_band():
    steps = np.arange(1, 5001, dtype=float)
    grouped = Curve(label="a", steps=steps, values=np.sin(steps)).grouped()
    assert grouped.steps.shape == (300,)
    assert np.all(grouped.least <= grouped.means)
    assert np.all(grouped.means <= grouped.most)
    assert grouped.means.mean() == pytest.approx(np.sin(steps).mean(), abs=1e-3)


def test_a_curve_without_points_is_refused():
    with pytest.raises(ValueError, match="as many values as steps"):
        Curve(label="a", steps=np.zeros(0), values=np.zeros(0))

"""Entries of `compare`, and the table and picture of a ranking."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from config.writing import write

from maxdiffusion.commands.preflight_ranking import Row, entry_overrides, publish
from maxdiffusion.config.loading import read_config
from maxdiffusion.preflight.chart import Bar, stacked_bars
from maxdiffusion.runtime.problems import ProblemsFound


def test_an_entry_is_a_name_or_a_name_and_a_split():
    assert entry_overrides("flash") == ("attention=flash",)
    assert entry_overrides("ulysses_ring_custom:4x2") == (
        "attention=ulysses_ring_custom",
        "ici_context_parallelism=8",
        "ulysses_shards=4",
    )


@pytest.mark.parametrize("entry", ["ulysses:4", "ulysses:4x", "", "a b"])
def test_another_form_is_refused(entry):
    with pytest.raises(ProblemsFound, match="ulysses_ring_custom:2x2"):
        entry_overrides(entry)


def test_bars_are_as_long_as_their_seconds():
    bars = [Bar(label="a < b", parts={"x": 1.0, "y": 3.0}), Bar(label="c", parts={"x": 2.0})]
    picture = ElementTree.fromstring(stacked_bars("t", bars))
    boxes = {
        note.text: float(box.get("width"))
        for box in picture.iter("{http://www.w3.org/2000/svg}rect")
        if (note := box.find("{http://www.w3.org/2000/svg}title")) is not None
    }
    assert boxes["y: 3.000 s"] == pytest.approx(3 * boxes["x: 1.000 s"], abs=0.2)
    assert boxes["x: 2.000 s"] == pytest.approx(2 * boxes["x: 1.000 s"], abs=0.2)


def test_a_ranking_is_sorted_and_written(tmp_path, capsys):
    path = tmp_path / "ranking.json"
    reading = read_config([write(tmp_path, "seed: 1\n"), f"report={path}"])
    rows = [
        Row(bar=Bar(label=label, parts={"kernels": seconds}), bound=1.0, facts={"split": label})
        for label, seconds in (("slow", 4.0), ("quick", 2.0))
    ]
    publish(reading, "seconds", rows)
    printed = capsys.readouterr().out
    assert printed.index("quick") < printed.index("slow")
    assert "50.0% of the bound's speed" in printed
    written = json.loads(path.read_text())
    assert [row["label"] for row in written] == ["quick", "slow"]
    assert written[0]["seconds_per_step"] == 2.0
    page = path.with_suffix(".html").read_text()
    assert page.index("quick") < page.index("slow")
    assert "<svg" in page
    assert "<td>50.0%</td>" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # it needs nothing else

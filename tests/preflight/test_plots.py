"""Charts show their data and are the same every time; without matplotlib the extra is named."""

import importlib.util
import xml.etree.ElementTree as ElementTree

import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.preflight.plots import Bar, HeatMap, Line, line_chart, stacked_bars
from maxdiffusion.preflight.tiles import Tried

SVG = "{http://www.w3.org/2000/svg}"
BARS = [
    Bar(label="a < b", parts={"x": 1.0, "y": 3.0}),
    Bar(label="c", parts={"x": 2.0, "exposed exchange": 0.5}),
]


def widths(svg, part):
    """Returns the widths of the boxes of a part, in the order of the bars."""
    root = ElementTree.fromstring(svg)
    paths = [
        path.get("d").split()
        for group in root.iter(f"{SVG}g")
        if group.get("id") == f"part {part}"
        for path in group.iter(f"{SVG}path")
    ]
    corners = [[float(path[1]), float(path[4])] for path in paths]
    return [max(corner) - min(corner) for corner in corners]


def texts(svg):
    return {text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")}


def test_bars_are_as_long_as_their_seconds():
    svg = stacked_bars("t", BARS)
    (x, other_x), (y, missing) = widths(svg, "x"), widths(svg, "y")
    assert y == pytest.approx(3 * x, rel=1e-3)
    assert other_x == pytest.approx(2 * x, rel=1e-3)
    assert missing == 0
    assert {"t", "a < b", "c", "x", "y", "exposed collectives", " 4.000 s"} <= texts(svg)


def test_a_chart_is_the_same_every_time():
    lines = [Line(label="a", points=[(1, 2.0), (4, 1.0)]), Line(label="none", points=[])]
    assert stacked_bars("t", BARS) == stacked_bars("t", BARS)
    drawn = [line_chart("t", lines, x_label="x", y_label="y") for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert {"1", "4", "a", "none", "x", "y"} <= texts(drawn[0])


def tried(block_q, block_kv, seconds):
    return Tried(
        purpose="self-attention",
        attention="ulysses_custom",
        place="here",
        batch=1,
        heads=2,
        q_len=512,
        kv_len=512,
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_kv_compute_in=block_kv,
        heads_per_tile=1,
        seconds=seconds,
        refusal="" if seconds < float("inf") else "VMEM",
    )


def test_a_heat_map_has_the_fastest_tile_of_each_pair(tmp_path):
    rows = [tried(128, 256, 2.0), tried(128, 256, 1.0), tried(256, 128, float("inf"))]
    heat_map = HeatMap.of("t", "timed", rows)
    assert heat_map.cells[128, 256].seconds == heat_map.best == 1.0
    assert (heat_map.block_qs, heat_map.block_kvs) == ([128, 256], [128, 256])
    heat_map.draw(tmp_path / "new" / "map.png")
    assert (tmp_path / "new" / "map.png").read_bytes().startswith(b"\x89PNG")


def test_a_heat_map_without_a_tile_that_can_run_is_drawn_too(tmp_path):
    HeatMap.of("t", "timed", [tried(128, 128, float("inf"))]).draw(tmp_path / "map.png")
    assert (tmp_path / "map.png").exists()


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ProblemsFound, match=r'pip install "maxdiffusion\[plots\]"'):
        stacked_bars("t", BARS)

"""The picture in the documentation is the one that its script draws."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_documented_picture_is_the_drawn_one():
    script = runpy.run_path(str(ROOT / "scripts" / "draw_attention.py"))
    assert (ROOT / "docs" / "attention.svg").read_text() == script["drawing"]()

"""Entries of `compare`, and the table and page of a ranking."""

import json

import pytest

from maxdiffusion.config.load import read_config
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.preflight.plots import Bar, RankingRow
from maxdiffusion.preflight.ranking import Ranked, entry_overrides, publish
from tests.config.writing import write


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


def test_a_ranking_is_shown_and_written(tmp_path, capsys):
    path = tmp_path / "ranking.json"
    parsed = read_config([write(tmp_path, "seed: 1\n"), f"report={path}"])
    entries = [
        Ranked(
            row=RankingRow(bar=Bar(label=label, parts={"kernels": seconds}), bound=1.0),
            json={"split": label},
        )
        for label, seconds in (("quick", 2.0), ("slow", 4.0))
    ]
    publish(parsed, "seconds", entries)
    printed = capsys.readouterr().out
    assert printed.index("quick") < printed.index("slow")
    assert "50.0% of the bound's speed" in printed
    written = json.loads(path.read_text())
    assert [row["label"] for row in written] == ["quick", "slow"]
    assert written[0]["seconds_per_step"] == 2.0
    assert written[0]["split"] == "quick"
    page = path.with_suffix(".html").read_text()
    assert page.index("quick") < page.index("slow")
    assert "<svg" in page
    assert "<td>50.0%</td>" in page
    namespaces = ("http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink")
    for name in namespaces:
        page = page.replace(name, "")
    assert "http" not in page  # it needs nothing else

"""The benchmark of attentions: real cases on a small model, a file that can be continued."""

import json
from xml.etree import ElementTree

import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.preflight.benchmark import (
    Case,
    Results,
    Sweep,
    cases_of,
    chart,
    run_sweep,
    table,
)
from tests.generation.command_line import TINY

SIZES = ("height=32", "width=32", "num_frames=1", "ici_data_parallelism=2", "ulysses_shards=2")


def sweep(*attentions: str, batches: tuple[int, ...] = (1,)) -> Sweep:
    arguments = (str(TINY), *SIZES, "ici_context_parallelism=4")
    return Sweep(arguments=arguments, cases=tuple(cases_of(attentions, batches)), steps=2)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One case that runs on eight devices, and one that needs a GPU."""
    results = Results(tmp_path_factory.mktemp("bench") / "b.jsonl", "job")
    run_sweep(sweep("dot_product", "cudnn_flash_te"), results)
    return results


@pytest.mark.slow
def test_a_case_is_timed_step_by_step(results):
    line, _ = results.lines()
    assert (line["attention"], line["videos"], line["refusal"]) == ("dot_product", 1, "")
    assert len(line["step_seconds"]) == 2
    assert 0 < line["seconds_per_video_step"] == line["seconds_per_step"]
    assert line["mesh"] == {"data": 2, "fsdp": 1, "ring": 2, "ulysses": 2, "tensor": 1}
    assert (line["devices"], line["tokens"]) == (8, 4)
    assert line["slowest_host"].startswith("0 (")
    assert line["hbm_bytes"] > 0


@pytest.mark.slow
def test_a_case_that_cannot_run_is_noted_with_its_reason(results):
    _, line = results.lines()
    assert line["key"] == "cudnn_flash_te b1"
    assert "cudnn" in line["refusal"].lower()


@pytest.mark.slow
def test_what_is_measured_is_not_measured_again(results, capsys):
    before = results.lines()
    run_sweep(sweep("dot_product", "cudnn_flash_te"), results)
    assert results.lines() == before
    assert capsys.readouterr().out == ""


def line_of(attention: str, videos: int, seconds: float, refusal: str = "") -> dict[str, object]:
    return {"seconds_per_step": seconds * videos, "seconds_per_video_step": seconds} | {
        "refusal": refusal
    }


@pytest.fixture
def written(tmp_path):
    results = Results(tmp_path / "new" / "b.jsonl", "job")
    for case in cases_of(["flash", "ring"], [2, 1]):
        slow = 1.0 if case.attention == "flash" else 0.5
        refusal = "too many" if case.key == "ring b2" else ""
        results.add(case, line_of(case.attention, case.videos, slow / case.videos, refusal))
    return results, tmp_path / "new" / "b.jsonl"


def test_a_line_that_was_cut_short_is_measured_again(written):
    results, path = written
    path.write_text(path.read_text()[:-30])
    assert [*results.finished()] == ["flash b1", "ring b1", "flash b2"]
    results.add(Case(attention="ring", videos=2), line_of("ring", 2, 0.1))
    assert [*results.finished()] == ["flash b1", "ring b1", "flash b2", "ring b2"]


def test_lines_of_other_jobs_are_left_alone(written):
    _, path = written
    other = Results(path, "another job")
    assert other.lines() == []
    other.add(Case(attention="flash", videos=1), line_of("flash", 1, 2.0))
    assert len(other.lines()) == 1
    assert len(Results(path, "job").lines()) == 4
    assert all(json.loads(text) for text in path.read_text().splitlines())


def test_another_kind_of_file_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("[1, 2]\n")
    with pytest.raises(ProblemsFound, match="is not a file of results"):
        Results(path, "job").lines()


def test_the_table_has_a_row_for_each_attention_and_says_what_was_refused(written):
    results, _ = written
    head, _, flash, ring, refusal = table(results.lines()).splitlines()
    assert head.split() == ["s", "per", "step", "and", "video", "b1", "b2"]
    assert flash.split() == ["flash", "1", "0.5"]
    assert ring.split() == ["ring", "0.5", "refused"]
    assert refusal == "ring b2: too many"


def test_the_picture_has_a_line_for_each_attention_and_a_dot_for_each_measurement(written):
    results, _ = written
    root = ElementTree.fromstring(chart("Steps < 1 s", results.lines()))
    name = "{http://www.w3.org/2000/svg}"
    drawn = {group.get("id"): group for group in root.iter(f"{name}g")}
    dots = [[*drawn[line].iter(f"{name}use")] for line in ("line 0", "line 1")]
    assert [len(line) for line in dots] == [2, 1]
    heights = [float(dot.get("y")) for line in dots for dot in line]
    assert heights[0] < heights[1]  # one second is drawn above half of one
    assert heights[1] == heights[2]
    texts = [text.text for text in root.iter(f"{name}text")]
    assert "Steps < 1 s" in texts
    assert {"1", "2", "flash (0.5 s at 2)", "ring (refused at 2)"} <= set(texts)


def test_small_batches_come_first():
    keys = [case.key for case in cases_of(["a", "b", "a"], [2, 1])]
    assert keys == ["a b1", "b b1", "a b2", "b b2"]

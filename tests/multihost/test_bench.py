"""The benchmark of attentions on two processes: the first one writes, and goes on where it was."""

import json
import signal
from pathlib import Path

from tests.multihost.launching import ROOT, TINY, launched, run

MODEL = ROOT / "tests" / "goldens" / "wan22_t2v"


def command(results: Path) -> tuple[object, ...]:
    return (
        *(ROOT / "scripts" / "bench_attention.py", TINY),
        *(f"pretrained_model_name_or_path={MODEL}", "height=32", "width=32", "num_frames=5"),
        *("ici_data_parallelism=2", "ici_context_parallelism=4"),
        *("--attentions", "dot_product,cudnn_flash_te", "--batches", "1,2", "--steps", "2"),
        *("--results", results),
    )


def test_two_processes_measure_and_one_writes_what_a_preempted_run_goes_on_with(
    tmp_path: Path,
) -> None:
    results = tmp_path / "bench.jsonl"
    results.write_text('{"job": "cut sho')  # as a run that was killed leaves it
    with launched(2, command(results)) as (first, second):
        first.wait_for("[1/4] dot_product, 1 at once: ")
        second.kill(signal.SIGTERM)
        assert [first.end(), second.end()] == [1, 1], first.output + second.output
        for one in (first, second):
            assert (
                "stopped: as asked, at case 3 of 4. The same command continues there." in one.output
            )
            assert "Traceback" not in one.output
    before = results.read_text()
    said = run(2, command(results))
    assert results.read_text().startswith(before)
    cut, *lines = results.read_text().splitlines()
    assert cut == '{"job": "cut sho'
    measured, refused, *after = map(json.loads, lines)
    assert (measured["key"], measured["processes"], measured["devices"]) == ("dot_product b1", 2, 8)
    assert len(measured["step_seconds"]) == 2
    assert measured["slowest_host"][0] in "01"
    assert "NVIDIA GPUs only" in refused["refusal"]
    assert [line["key"] for line in after] == ["dot_product b2", "cudnn_flash_te b2"]
    assert "s per step and video" in said[0]
    assert "s per step and video" not in said[1]
    assert results.with_suffix(".svg").read_text().startswith("<svg")

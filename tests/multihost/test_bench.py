"""The benchmark of attentions on two processes: the first one writes, and goes on where it was."""

import json
from pathlib import Path

from multihost.launching import ROOT, TINY, run

MODEL = ROOT / "tests" / "goldens" / "wan22_t2v"


def test_two_processes_measure_and_one_writes(tmp_path: Path) -> None:
    results = tmp_path / "bench.jsonl"
    results.write_text('{"job": "cut sho')  # as a run that was killed leaves it
    said = run(
        2,
        (
            *(ROOT / "scripts" / "bench_attention.py", TINY),
            *(f"pretrained_model_name_or_path={MODEL}", "height=32", "width=32", "num_frames=5"),
            *("ici_data_parallelism=2", "ici_context_parallelism=4"),
            *("--attentions", "dot_product,cudnn_flash_te", "--batches", "1", "--steps", "2"),
            *("--results", results),
        ),
    )
    cut, *lines = results.read_text().splitlines()
    assert cut == '{"job": "cut sho'
    measured, refused = map(json.loads, lines)
    assert (measured["key"], measured["processes"], measured["devices"]) == ("dot_product b1", 2, 8)
    assert len(measured["step_seconds"]) == 2
    assert measured["slowest_host"][0] in "01"
    assert "NVIDIA GPUs only" in refused["refusal"]
    assert "s per step and video" in said[0]
    assert "s per step and video" not in said[1]
    assert results.with_suffix(".svg").read_text().startswith("<svg")

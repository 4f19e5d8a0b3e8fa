"""The search over tiles: what is tried, kept and shown; compiling is preflight's."""

from pathlib import Path

import pytest

from maxdiffusion.commands import tune_attention
from maxdiffusion.commands.tune_attention import (
    Tried,
    read_table,
    show,
    tile_overrides,
    write_table,
)
from maxdiffusion.config.loading import read_config
from maxdiffusion.runtime.problems import ProblemsFound, RunFailed
from maxdiffusion.tune_attention import main

CONFIG = str(Path(__file__).parents[2] / "configs/wan_tiny.yml")


def tried(block_q, seconds, *, refusal=""):
    return Tried(
        attention="ulysses_custom",
        topology="tpu7x:2x2x1",
        tokens=75_600,
        block_q=block_q,
        block_kv=1024,
        seconds=seconds,
        mxu_share=0.9,
        vmem_bytes=1,
        refusal=refusal,
    )


def test_a_table_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "tiles.csv"
    rows = [tried(1024, 0.5), tried(2048, float("inf"), refusal="too much, VMEM")]
    write_table(path, rows)
    assert read_table(path) == rows
    assert read_table(tmp_path / "none.csv") == []
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ProblemsFound, match="not a table of an earlier search"):
        read_table(path)


def test_the_quickest_is_shown_first_with_its_overrides(capsys):
    show([tried(1024, 0.5), tried(2048, 0.25), tried(4096, float("inf"), refusal="no")])
    lines = capsys.readouterr().out.splitlines()
    assert "block_q  2048" in lines[1]
    assert lines[-1] == "best: " + " ".join(tile_overrides(2048, 1024))
    assert "4096" not in "".join(lines)
    with pytest.raises(RunFailed):
        show([tried(4096, float("inf"), refusal="no")])


def test_what_is_known_is_not_compiled_again(monkeypatch, tmp_path, capsys):
    path = tmp_path / "tiles.csv"
    compiled = []

    def attempts(reading, arguments, known):
        for block_q in (1024, 2048):
            row = tried(block_q, 1.0 / block_q)
            if row.place not in known:
                compiled.append(block_q)
            yield known.get(row.place, row)

    monkeypatch.setattr(tune_attention, "attempts", attempts)
    write_table(path, [tried(1024, 3.0)])
    tune_attention.tune(read_config([CONFIG, f"report={path}"]), [])
    assert compiled == [2048]
    assert [row.seconds for row in read_table(path)] == [3.0, 1.0 / 2048]
    assert "[2/15] block_q 2048, block_kv 1024" in capsys.readouterr().out


def test_overrides_load():
    config = read_config([CONFIG, *tile_overrides(4096, 2048)]).config
    assert config.flash_block_sizes["block_q"] == 4096
    assert config.flash_block_sizes["block_kv_compute_in"] == 2048


def test_bad_input(capsys):
    assert main([]) == 2
    assert main([CONFIG, "topology=v9:1x1"]) == 2
    assert "tpu7x:{2x2x1" in capsys.readouterr().err

"""The search over tiles: what is tried, kept, drawn and applied, on interpreted kernels."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from maxdiffusion.attention import UnsupportedAttention
from maxdiffusion.attention.backends.flash import FlashBackend
from maxdiffusion.attention.options import read_tuned_blocks, write_tuned_blocks
from maxdiffusion.config.load import read_config
from maxdiffusion.errors import ProblemsFound, RunFailed
from maxdiffusion.preflight.command import plan_on
from maxdiffusion.preflight.tile_search import (
    Measured,
    Meter,
    Search,
    search_before_run,
    subjects,
    tune_here,
)
from maxdiffusion.preflight.tiles import (
    Tried,
    candidates,
    current_sizes,
    fitting,
    read_table,
    write_table,
)
from maxdiffusion.tune_attention import main

CONFIG = str(Path(__file__).parents[2] / "configs/wan_tiny.yml")
KERNELS = ("attention=ulysses_custom", "flash_min_seq_length=0", "ici_context_parallelism=1")
# 256 tokens, two blocks at most, and little text: interpreted kernels are slow.
SMALL = ("height=256", "width=256", "num_frames=1", "max_sequence_length=64")


def parsed(*overrides):
    return read_config([CONFIG, *KERNELS, *SMALL, *overrides])


def planned(*overrides):
    return plan_on(parsed(*overrides), jax.devices()[:1])


def seconds_by_queries(purpose, plan):
    """A meter for tests: fewer queries a block are quicker."""
    return Measured(seconds=plan.backend.blocks.block_q / 1024)


def search(**changes):
    meter = Meter(how="by test", place="here", measure=seconds_by_queries)
    fields = {"meter": meter, "mode": "smart", "table": None}
    return Search(**{**fields, **changes})


def tried(block_q, seconds=1.0, **changes):
    row = Tried(
        purpose="self-attention",
        attention="ulysses_custom",
        place="here",
        batch=1,
        heads=2,
        q_len=75_600,
        kv_len=75_600,
        block_q=block_q,
        block_kv=1024,
        block_kv_compute=1024,
        block_kv_compute_in=1024,
        heads_per_tile=1,
        seconds=seconds,
    )
    return replace(row, **changes)


def test_both_attentions_of_a_block_are_searched():
    job = planned()
    assert [s.purpose for s in subjects(job.builder, job.shape)] == [
        "self-attention",
        "cross-attention",
    ]
    dense = planned("attention=dot_product")
    assert subjects(dense.builder, dense.shape) == []


def test_candidates_start_with_what_is_in_force_and_never_exceed_the_lengths():
    job = planned()
    for subject in subjects(job.builder, job.shape):
        found = candidates(subject.plan, "smart")
        assert found[0] == current_sizes(subject.plan.backend)
        assert len(set(found)) == len(found)
        full = candidates(subject.plan, "full")
        assert len(full) >= len(found)
    assert fitting((128, 256, 512), 200, 2) == [128, 256]
    assert fitting((128, 256, 512), 75_600, 2) == [256, 512]
    assert fitting((128, 256, 512), 300, 5) == [128, 256, 384]


def test_the_winner_is_kept_and_used_by_later_plans(tmp_path):
    job = planned()
    winners = search().run(subjects(job.builder, job.shape))
    path = tmp_path / "blocks.json"
    write_tuned_blocks(path, winners)
    assert read_tuned_blocks(path) == tuple(winners)
    tuned = planned(f"tuned_blocks_file={path}")
    attention = tuned.builder.attention(tuned.shape)
    for plan, winner in zip(
        (attention.self_attention, attention.cross_attention), winners, strict=True
    ):
        assert isinstance(plan.backend, FlashBackend)
        blocks = plan.backend.blocks
        wanted = winner.blocks.given()
        assert {name: vars(blocks)[name] for name in wanted} == wanted
        assert blocks.block_q == 128
    notes = tuned.notes
    assert notes[0].startswith("tiles of self-attention from a search, by test: block_q 128")
    assert len(notes) == 2
    # Sizes that a config gives stand before those of the file.
    given = planned(f"tuned_blocks_file={path}", "flash_block_sizes.block_q=256")
    assert given.builder.self_attention(given.shape).backend.blocks.block_q == 256


def test_a_search_goes_on_where_it_was_stopped(tmp_path):
    job, table = planned(), tmp_path / "out" / "tiles.csv"
    found = subjects(job.builder, job.shape)[:1]
    measured = []

    def stopping(purpose, plan):
        if len(measured) == 1:
            raise KeyboardInterrupt
        measured.append(plan)
        return Measured(seconds=1.0)

    meter = Meter(how="by test", place="here", measure=stopping)
    with pytest.raises(KeyboardInterrupt):
        search(meter=meter, table=table).run(found)
    (kept,) = read_table(table)
    search(table=table).run(found)
    rows = read_table(table)
    assert rows[0] == kept
    assert len(rows) == len(candidates(found[0].plan, "smart"))
    assert table.with_name("tiles_self-attention.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_run_is_no_winner(capsys):
    job = planned()
    subject = subjects(job.builder, job.shape)[0]

    def refusing(purpose, plan):
        raise UnsupportedAttention("ulysses_custom", [])

    meter = Meter(how="by test", place="here", measure=refusing)
    with pytest.raises(RunFailed, match="no tile of self-attention"):
        search(meter=meter).run([subject])


@pytest.mark.slow
def test_the_command_times_kernels_and_writes_everything(tmp_path, capsys):
    blocks, out = tmp_path / "blocks.json", tmp_path / "search"
    split = (
        "ici_data_parallelism=2",
        "ici_context_parallelism=4",
        "tile_search_iters=2",
        "height=128",
        "width=128",
    )
    files = (f"tuned_blocks_file={blocks}", f"tile_search_out={out}")
    tune_here(parsed(*split, *files))
    printed = capsys.readouterr().out
    assert "one attention on one device, timed on cpu (interpreted)" in printed
    assert "best: flash_block_sizes.block_q=" in printed
    rows = json.loads(blocks.read_text())["rows"]
    assert {row["kernel"] for row in rows} == {"flash online"}
    assert len(rows) == 2
    assert {path.name for path in out.iterdir()} == {
        *("tiles.csv", "tiles_self-attention.png", "tiles_cross-attention.png")
    }


def test_a_run_searches_first_and_only_what_is_not_known(tmp_path, caplog):
    meter = Meter(how="by test", place="here", measure=seconds_by_queries)
    path = tmp_path / "blocks.json"
    keys = (f"tuned_blocks_file={path}", "enable_tile_search=true")
    job = planned(*keys)
    changed = search_before_run(job.builder, job.config, job.shape, meter)
    attention = changed.attention(job.shape)
    assert attention.self_attention.backend.blocks.block_q == 128
    assert attention.cross_attention.backend.blocks.block_q == 128
    caplog.clear()
    again = planned(*keys)
    same = search_before_run(again.builder, again.config, again.shape, meter)
    assert same.attention(again.shape) == attention
    assert "nothing to search" in caplog.messages[0]
    plain = planned()
    assert search_before_run(plain.builder, plain.config, plain.shape) is plain.builder


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "it is no JSON"),
        ("{}", "its format must be"),
        ('{"format": "maxdiffusion tuned blocks 1", "rows": [{"chip": 1}]}', "this row is not"),
    ],
)
def test_a_file_that_is_no_table_of_tiles_is_refused(tmp_path, content, message):
    path = tmp_path / "blocks.json"
    path.write_text(content)
    with pytest.raises(ProblemsFound, match=message):
        planned(f"tuned_blocks_file={path}")
    with pytest.raises(ProblemsFound, match="it cannot be read"):
        planned(f"tuned_blocks_file={tmp_path / 'none.json'}")


def test_a_table_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "tiles.csv"
    rows = [tried(1024, 0.5), tried(2048, float("inf"), refusal="too much, VMEM")]
    write_table(path, rows)
    assert read_table(path) == rows
    assert read_table(tmp_path / "none.csv") == []
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ProblemsFound, match="not a table of an earlier search"):
        read_table(path)


def test_overrides_load():
    config = read_config([CONFIG, *tried(4096).overrides]).config
    assert config.flash_block_sizes["block_q"] == 4096
    assert config.flash_block_sizes["block_kv_compute_in"] == 1024


def test_bad_input(capsys):
    assert main([]) == 2
    assert main([CONFIG, "topology=v9:1x1"]) == 2
    assert "tpu7x:{2x2x1" in capsys.readouterr().err
    assert main([CONFIG, "attention=dot_product", "topology="]) == 2
    assert "no Pallas kernel" in capsys.readouterr().err

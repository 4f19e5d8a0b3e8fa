"""The search over tiles: what is tried, kept, drawn and applied, on interpreted kernels."""

import json
from dataclasses import replace
from pathlib import Path

import imageio.v3 as imageio
import jax
import pytest

from maxdiffusion.attention import UnsupportedAttention
from maxdiffusion.attention.on_device.flash import FlashKernel
from maxdiffusion.attention.tuned_sites import read_tuned_sites, write_tuned_sites
from maxdiffusion.commands import tile_search
from maxdiffusion.commands.preflight import plan_job
from maxdiffusion.commands.tile_search import Measured, Meter, Search, search_before_run, subjects
from maxdiffusion.commands.tune_attention import tune_here
from maxdiffusion.config.loading import read_config
from maxdiffusion.preflight.tile_candidates import candidates, fitting, sizes_in_force
from maxdiffusion.preflight.tile_table import Tried, read_table, write_table
from maxdiffusion.runtime.problems import ProblemsFound, RunFailed
from maxdiffusion.tune_attention import main

CONFIG = str(Path(__file__).parents[2] / "configs/wan_tiny.yml")
KERNELS = ("attention=ulysses_custom", "flash_min_seq_length=0", "ici_context_parallelism=1")
# 256 tokens, two blocks at most, and little text: interpreted kernels are slow.
SMALL = ("height=256", "width=256", "num_frames=1", "max_sequence_length=64")


def reading(*overrides):
    return read_config([CONFIG, *KERNELS, *SMALL, *overrides])


def planned(*overrides):
    return plan_job(reading(*overrides), jax.devices()[:1])


def seconds_by_queries(purpose, plan):
    """A meter for tests: fewer queries a block are quicker."""
    return Measured(seconds=plan.kernel.blocks.block_q / 1024)


def search(**changes):
    meter = Meter(how="by test", place="here", measure=seconds_by_queries)
    fields = {"meter": meter, "mode": "smart", "table": None, "say": lambda text: None}
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
    assert [s.purpose for s in subjects(job.workshop, job.shape)] == [
        "self-attention",
        "cross-attention",
    ]
    dense = planned("attention=dot_product")
    assert subjects(dense.workshop, dense.shape) == []


def test_candidates_start_with_what_is_in_force_and_never_exceed_the_lengths():
    job = planned()
    for subject in subjects(job.workshop, job.shape):
        found = candidates(subject.plan, "smart")
        assert found[0] == sizes_in_force(subject.plan.kernel)
        assert len({tuple(sizes.items()) for sizes in found}) == len(found)
        full = candidates(subject.plan, "full")
        assert len(full) >= len(found)
    assert fitting((128, 256, 512), 200, 2) == [128, 256]
    assert fitting((128, 256, 512), 75_600, 2) == [256, 512]
    assert fitting((128, 256, 512), 300, 5) == [128, 256, 384]


def test_the_winner_is_kept_and_used_by_later_plans(tmp_path):
    job = planned()
    winners = search().run(subjects(job.workshop, job.shape))
    path = tmp_path / "blocks.json"
    write_tuned_sites(path, winners)
    assert read_tuned_sites(path) == tuple(winners)
    tuned = planned(f"tuned_blocks_file={path}")
    attention = tuned.workshop.attention(tuned.shape)
    for plan, winner in zip(
        (attention.self_attention, attention.cross_attention), winners, strict=True
    ):
        assert isinstance(plan.kernel, FlashKernel)
        blocks = plan.kernel.blocks
        assert {name: getattr(blocks, name) for name, _ in winner.sizes} == dict(winner.sizes)
        assert blocks.block_q == 128
    notes = tile_search.tile_notes(tuned.workshop, tuned.shape)
    assert notes[0].startswith("tiles of self-attention from a search, by test: block_q 128")
    assert len(notes) == 2
    # Sizes that a config gives stand before those of the file.
    given = planned(f"tuned_blocks_file={path}", "flash_block_sizes.block_q=256")
    assert given.workshop.self_attention(given.shape).kernel.blocks.block_q == 256


def test_a_search_goes_on_where_it_was_stopped(tmp_path):
    job, table = planned(), tmp_path / "out" / "tiles.csv"
    found = subjects(job.workshop, job.shape)[:1]
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
    assert imageio.imread(table.with_name("tiles_self-attention.png")).shape[2] == 3


def test_what_cannot_run_is_no_winner(capsys):
    job = planned()
    subject = subjects(job.workshop, job.shape)[0]

    def refusing(purpose, plan):
        raise UnsupportedAttention("ulysses_custom", [])

    meter = Meter(how="by test", place="here", measure=refusing)
    with pytest.raises(RunFailed, match="no tile of self-attention"):
        search(meter=meter).run([subject])


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
    tune_here(reading(*split, *files))
    printed = capsys.readouterr().out
    assert "one attention on one device, timed on cpu (interpreted)" in printed
    assert "best: flash_block_sizes.block_q=" in printed
    rows = json.loads(blocks.read_text())["rows"]
    assert {row["kernel"] for row in rows} == {"flash online"}
    assert len(rows) == 2
    assert {path.name for path in out.iterdir()} == {
        *("tiles.csv", "tiles_self-attention.png", "tiles_cross-attention.png")
    }


def test_a_run_searches_first_and_only_what_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr(
        tile_search,
        "clock_meter",
        lambda *_: Meter(how="by test", place="here", measure=seconds_by_queries),
    )
    path, said = tmp_path / "blocks.json", []
    keys = (f"tuned_blocks_file={path}", "enable_tile_search=true")
    job = planned(*keys)
    changed = search_before_run(job.workshop, job.config, job.shape, said.append)
    attention = changed.attention(job.shape)
    assert attention.self_attention.kernel.blocks.block_q == 128
    assert attention.cross_attention.kernel.blocks.block_q == 128
    said.clear()
    again = planned(*keys)
    same = search_before_run(again.workshop, again.config, again.shape, said.append)
    assert same.attention(again.shape) == attention
    assert "nothing is searched" in said[0]
    plain = planned()
    assert search_before_run(plain.workshop, plain.config, plain.shape) is plain.workshop


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

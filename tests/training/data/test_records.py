"""Records become batches of a training as they are; what cannot be trained on is said first."""

import json
from pathlib import Path

import numpy as np
import pytest

from maxdiffusion.config.load import load_config
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.pipelines.spec import open_wan_folder
from maxdiffusion.training.data import records as records_module
from maxdiffusion.training.data.batches import Batches, Order
from maxdiffusion.training.data.records import open_records
from maxdiffusion.training.data.store import as_clip_batch, open_store
from tests.training.command_line import small_run
from tests.training.data.record_files import clip, write

MODEL = Path(__file__).parents[2] / "goldens" / "wan21_t2v"
TEXT = {"rows": 512, "width": 64, "used": 9}
SMALL, LARGE = (16, 2, 4, 4), (16, 1, 4, 6)


@pytest.fixture
def folder(tmp_path):
    """Two files: eleven clips of one size, eight of another, and one with a full caption."""
    (tmp_path / "records").mkdir()
    clips = [clip(seed, size=SMALL, **TEXT) for seed in range(11)]
    full = clip(90, size=SMALL, **{**TEXT, "used": 512})
    write(tmp_path / "records" / "file_00-11.tfrec", [*clips[:4], full, *clips[4:]])
    write(
        tmp_path / "records" / "file_01-19.tfrec",
        [clip(100 + seed, size=LARGE, **TEXT) for seed in range(8)],
    )
    return tmp_path


def config(folder, *more):
    given = (
        "dataset_type=tfrecord",
        f"train_data_dir={folder / 'records'}",
        "train_text_encoder=false",
        "caption_dropout=0",
    )
    return load_config(small_run(MODEL, folder, *given, *more))


def opened(folder, *more):
    return open_records(config(folder, *more), *open_wan_folder(MODEL))


def test_records_are_clips_by_size_listed_once(folder, monkeypatch):
    store = open_store(config(folder), *open_wan_folder(MODEL))
    assert store.latents == [(2, 4, 4), (1, 4, 6)]
    assert "19 clips of latents (2, 4, 4) or (1, 4, 6)" in store.describe()
    samples, text = store.read()
    assert [len(held) for held in samples] == [11, 8]
    assert text.empty.shape == (511, 64)
    batch = next(Batches(samples[0], Order(batch=4, seed=None), as_clip_batch))
    latents, rows = clip(2, size=SMALL, **TEXT)
    np.testing.assert_array_equal(batch.latents[2], np.moveaxis(latents, 0, -1))
    np.testing.assert_array_equal(batch.captions.rows[2], rows[:511])
    (skipped,) = (folder / "cache" / "skipped.jsonl").read_text().splitlines()
    assert "its caption fills all rows" in json.loads(skipped)["reason"]
    monkeypatch.delattr(records_module, "list_records")  # the list of the first run is read
    assert [len(held) for held in opened(folder).sets] == [11, 8]


def test_held_out_records_are_sets_of_their_own(folder):
    held_out = folder / "held_out"
    held_out.mkdir()
    write(held_out / "a.tfrec", [clip(seed, size=SMALL, **TEXT) for seed in range(8)])
    store = opened(folder, "eval_every=2", f"eval_data_dir={held_out}")
    assert store.trained == 2
    assert store.latents == [(2, 4, 4), (1, 4, 6), (2, 4, 4)]
    for wrong in ("", f"eval_data_dir={folder / 'records'}"):
        with pytest.raises(ProblemsFound, match="eval_data_dir="):
            open_store(config(folder, "eval_every=2", *wrong.split()), *open_wan_folder(MODEL))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train_text_encoder=true", "records hold embeddings of captions"),
        ("video_buckets=[[5,32,32]]", "records have their own sizes"),
        ("max_sequence_length=256", r"must be \(256, 64\): max_sequence_length"),
        ("train_data_dir=nowhere", "train_data_dir=.*holds no"),
    ],
)
def test_what_records_cannot_serve_is_refused(folder, change, message):
    with pytest.raises(ProblemsFound, match=message):
        opened(folder, change)


def test_latents_of_another_model_are_refused(folder):
    write(folder / "records" / "b.tfrec", [clip(0, size=(48, 2, 4, 4), **TEXT)])
    write(folder / "records" / "c.tfrec", [clip(0, size=(16, 2, 4, 5), **TEXT)])
    with pytest.raises(ProblemsFound) as caught:
        opened(folder)
    rules = [problem.rule for problem in caught.value.problems]
    assert rules == [
        "must be [16, frames, rows, columns] for this model",
        "frames, rows and columns must be multiples of (1, 2, 2)",
    ]

"""The command trains, continues, and writes a model that opens; what cannot run is said first."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiffusion import preprocess_wan, train_wan
from maxdiffusion.checkpoints.safetensors_io import open_weights
from maxdiffusion.pipelines.spec import open_wan_folder
from maxdiffusion.runtime.video import read_video, write_video
from maxdiffusion.training.data import store as training_data
from tests.training.command_line import CONFIG, fill, noise, small_run
from tests.training.interrupted import (
    SHARDED,
    assert_moments_are_sharded,
    assert_same_end,
    run_until_killed,
    shared_programs,
)

__all__ = ["shared_programs"]

MODEL = Path(__file__).parents[1] / "goldens" / "wan21_t2v"


@pytest.fixture
def cache(tmp_path):
    """Clips that were encoded before: by noise instead of an autoencoder, which is quicker."""
    fill(tmp_path / "cache", MODEL, noise())
    return tmp_path / "cache"


def arguments(tmp_path, *more):
    folders = (
        f"checkpoint_dir={tmp_path / 'checkpoints'}",
        f"metrics_file={tmp_path / 'metrics.jsonl'}",
    )
    return small_run(MODEL, tmp_path, *folders, *more)


def read_steps(tmp_path):
    return [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.slow
def test_a_killed_run_continues_bit_for_bit_and_writes_a_model(
    cache, shared_programs, tmp_path, capsys
):
    def run(name, *more):
        folder = tmp_path / name
        return small_run(
            MODEL,
            tmp_path,
            *("ici_data_parallelism=4", "ici_fsdp_parallelism=2", SHARDED, shared_programs),
            *("max_train_steps=4", "checkpoint_every=2", "weights_dtype=float32"),
            f"checkpoint_dir={folder / 'checkpoints'}",
            f"metrics_file={folder / 'metrics.jsonl'}",
            f"export_dir={folder / 'model'}",
            *more,
        )

    assert train_wan.main(run("whole")) == 0
    assert_moments_are_sharded(tmp_path / "whole")
    run_until_killed(run("killed"), step=4)
    assert read_steps(tmp_path / "killed") == [1, 2, 3]
    samples = tmp_path / "samples"
    sampled = ("sample_every=4", "num_inference_steps=1", f"output_dir={samples}")
    assert train_wan.main(run("killed", *sampled)) == 0
    assert "continuing after step 2" in capsys.readouterr().out
    assert_same_end(tmp_path / "whole", tmp_path / "killed")
    report = (tmp_path / "killed" / "metrics.html").read_text()
    assert "Training, 4 steps" in report
    assert "data:video/mp4;base64," in report
    assert "remat NONE" in report  # of the start-up report
    video, _ = read_video(samples / "step_000004.mp4")
    assert video.shape == (5, 32, 32, 3)
    model = tmp_path / "killed" / "model"
    line = json.loads((tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["perf/tokens_per_second"] > 0
    assert any(name.startswith("learning/loss_") for name in line)
    _, spec = open_wan_folder(model)
    assert spec.transformer == open_wan_folder(MODEL)[1].transformer
    for part in ("transformer", "text_encoder"):
        new, old = (open_weights(folder / part) for folder in (model, MODEL))
        shapes = [{name: t.shape for name, t in held.tensors.items()} for held in (new, old)]
        assert shapes[0] == shapes[1]


def test_what_is_missing_is_said_before_anything_is_read(capsys):
    code = train_wan.main([str(CONFIG), "pretrained_model_name_or_path=/nowhere"])
    said = capsys.readouterr().err
    assert code == 2
    assert "checkpoint_dir" in said
    assert "latent_cache_dir" in said


def test_a_locked_folder_is_one_clear_line(cache, tmp_path, capsys):
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    assert train_wan.main(arguments(tmp_path, "max_train_steps=1")) == 2
    said = capsys.readouterr().err
    assert f"checkpoint_dir={str(tmp_path / 'checkpoints')!r}: nothing can be written there" in said


def test_a_full_disk_is_found_before_the_work(cache, tmp_path, capsys, monkeypatch):
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    assert train_wan.main(arguments(tmp_path, f"export_dir={tmp_path / 'model'}")) == 2
    assert "export_dir=" in capsys.readouterr().err
    assert train_wan.main(arguments(tmp_path)) == 2
    said = capsys.readouterr().err
    assert "checkpoint_dir=" in said
    assert "GB of disk, and 1e-06 GB are free. Make room there" in said
    (cache / "shard-00000.safetensors").unlink()
    assert preprocess_wan.main(arguments(tmp_path)) == 2
    assert "latent_cache_dir=" in capsys.readouterr().err
    assert not [*tmp_path.rglob("*.safetensors")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train_data_dir=nowhere", "training data='nowhere': is not a folder"),
        ("video_buckets=[[5,32]]", "every bucket must be [frames, height, width]"),
        ("video_buckets=[[5,32,40]]", "width=40: must be a positive multiple of 16"),
        ("video_buckets=[[5,64,64]]", "video_buckets=['5x64x64']: none of 33 videos fits"),
        ("dataset_type=synthetic", "buckets are for dataset_type=videos"),
    ],
)
def test_bad_data_is_one_clear_line(videos, tmp_path, capsys, change, message):
    assert preprocess_wan.main(arguments(tmp_path, *videos, change)) == 2
    assert message in capsys.readouterr().err


BUCKETS = {(5, 32, 32): (2, 4, 4), (1, 16, 48): (1, 2, 6)}
BATCH = 16  # two clips on every device


@pytest.fixture
def videos(tmp_path):
    """A batch of videos, one of images, a video that is too small, and the keys to use them."""
    folder = tmp_path / "videos"
    write_video(folder / "small.mp4", np.zeros((5, 8, 8, 3), np.uint8), fps=8)
    for number in range(BATCH):
        pixels = np.full((5, 32, 50, 3), 10 * number, np.uint8)
        write_video(folder / f"video_{number}.mp4", pixels[:, :, :32], fps=8)
        Image.fromarray(pixels[0, :20]).save(folder / f"image_{number}.png")
    for file in [*folder.iterdir()]:
        file.with_suffix(".txt").write_text(f"the clip {file.stem}")
    return (
        "dataset_type=videos",
        f"global_batch_size={BATCH}",
        f"train_data_dir={folder}",
        f"video_buckets={[list(size) for size in BUCKETS]}",
        "train_text_encoder=false",
    )


@pytest.mark.slow
def test_images_and_videos_train_on_stored_text(videos, tmp_path, capsys, monkeypatch):
    def quick(folder, spec):
        """Noise instead of an autoencoder, which is quicker."""

        def encode(clips):
            shape = BUCKETS[clips.shape[1:4]]
            rng = np.random.default_rng(int(clips.sum()))
            return rng.standard_normal((len(clips), *shape, spec.vae.z_dim))

        return encode

    monkeypatch.setattr(training_data, "clip_encoder", quick)
    assert preprocess_wan.main(arguments(tmp_path, *videos)) == 0
    said = capsys.readouterr().out
    assert "16 of 16 clips of 5x32x32" in said
    assert "16 of 16 clips of 1x16x48" in said
    assert "1 clips were skipped" in said
    assert "small.mp4: is 5x8x8, and smaller than every bucket" in said
    # From here on everything that is encoded is read.
    monkeypatch.delattr(training_data, "clip_encoder")
    monkeypatch.delattr(training_data, "text_encoder")
    more = ("max_train_steps=3", "train_from_scratch=true", "sample_every=0")
    assert train_wan.main(arguments(tmp_path, *videos, *more)) == 0
    said = capsys.readouterr().out
    assert "model: new weights" in said
    assert "latents (2, 4, 4) or (1, 2, 6)" in said
    assert "from stored embeddings" in said
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    times = [line["perf/tokens_per_second"] * line["perf/step_time_seconds"] for line in lines]
    # Clips of 2 x 2 x 2 or 1 x 1 x 3 tokens.
    assert {round(tokens) for tokens in times} == {8 * BATCH, 3 * BATCH}
    stored = tmp_path / "checkpoints" / "3" / "state" / "_METADATA"
    assert "transformer" in stored.read_text()
    assert "text_encoder" not in stored.read_text()

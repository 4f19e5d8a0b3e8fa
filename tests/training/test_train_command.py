"""The command trains, continues, and writes a model that opens; what cannot run is said first."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from maxdiffusion import train_wan
from maxdiffusion.commands.training_data import SHARD, model_hash
from maxdiffusion.pipelines.prompts import PromptTokenizer
from maxdiffusion.pipelines.spec import open_wan_folder
from maxdiffusion.training.clips import ClipFormat
from maxdiffusion.training.latent_cache import CachePlan, fill_cache
from maxdiffusion.training.sources import SyntheticClips
from maxdiffusion.weights.safetensors_index import open_weights

MODEL = Path(__file__).parents[1] / "goldens" / "wan21_t2v"
CONFIG = Path(__file__).parents[2] / "configs" / "train_embedded.yml"
CLIPS = SyntheticClips(clip=ClipFormat(frames=5, size=32), count=8, seed=0)


@pytest.fixture
def cache(tmp_path):
    """Clips that were encoded before: by noise instead of an autoencoder, which is quicker."""
    folder, spec = open_wan_folder(MODEL)
    tokenizer = PromptTokenizer.load(MODEL / "tokenizer")
    longest = max(len(tokenizer.ids(CLIPS.caption(index))) for index in range(8))
    tokens = next(size for size in (32, 64, 128) if longest <= size)
    rng = np.random.default_rng(0)
    fill_cache(
        tmp_path / "cache",
        CLIPS,
        CachePlan(model=model_hash(folder), caption_tokens=tokens, shard=SHARD),
        encode=lambda videos: rng.standard_normal((len(videos), 2, 4, 4, spec.vae.z_dim)),
        tokenize=tokenizer.ids,
    )
    return tmp_path / "cache"


def arguments(tmp_path, *more):
    return [
        str(CONFIG),
        f"pretrained_model_name_or_path={MODEL}",
        "model_name=wan2.1",
        "num_frames=5",
        "height=32",
        "width=32",
        "seed=0",
        "synthetic_clips=8",
        "global_batch_size=8",
        "ici_data_parallelism=8",
        f"latent_cache_dir={tmp_path / 'cache'}",
        f"checkpoint_dir={tmp_path / 'checkpoints'}",
        f"metrics_file={tmp_path / 'metrics.jsonl'}",
        *more,
    ]


def read_steps(tmp_path):
    return [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]


def test_trains_continues_and_writes_a_model(cache, tmp_path, capsys):
    assert train_wan.main(arguments(tmp_path, "max_train_steps=2")) == 0
    model = tmp_path / "model"
    more = ("max_train_steps=3", f"export_dir={model}", "weights_dtype=float32")
    assert train_wan.main(arguments(tmp_path, *more)) == 0
    said = capsys.readouterr().out
    assert "continuing after step 2" in said
    assert read_steps(tmp_path) == [1, 2, 3]
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["perf/tokens_per_second"] > 0
    assert any(name.startswith("learning/loss_") for name in line)
    _, spec = open_wan_folder(model)
    assert spec.transformer == open_wan_folder(MODEL)[1].transformer
    for part in ("transformer", "text_encoder"):
        new, old = (open_weights(folder / part)[0] for folder in (model, MODEL))
        shapes = [{name: t.shape for name, t in held.tensors.items()} for held in (new, old)]
        assert shapes[0] == shapes[1]


def test_what_is_missing_is_said_before_anything_is_read(capsys):
    code = train_wan.main([str(CONFIG), "pretrained_model_name_or_path=/nowhere"])
    said = capsys.readouterr().err
    assert code == 2
    assert "checkpoint_dir" in said
    assert "latent_cache_dir" in said


def test_a_full_disk_or_a_locked_folder_is_one_clear_line(cache, tmp_path, capsys):
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    code = train_wan.main(arguments(tmp_path, "max_train_steps=1"))
    assert code in (1, 2)
    assert "checkpoint" in capsys.readouterr().err

"""Processes train as one device does, save, and continue in another number."""

import json
from pathlib import Path

import numpy as np
import pytest

from maxdiffusion.checkpoints.safetensors_io import open_weights
from maxdiffusion.pipelines.spec import open_wan_folder
from tests.multihost.launching import ROOT, run
from tests.training import tiny_training as tiny
from tests.training.test_step import RTOL
from tests.training.test_train_command import CLIPS, CONFIG, MODEL, cache

__all__ = ["cache"]

WORKER = ROOT / "tests" / "multihost" / "worker.py"
PAIRS = f"synthetic_pair_share={CLIPS.clip.pair_share}"  # of the clips that `cache` has encoded


def command(folder: Path, *more: str) -> tuple[object, ...]:
    return (
        *("-m", "maxdiffusion.train_wan", CONFIG, f"pretrained_model_name_or_path={MODEL}"),
        *("model_name=wan2.1", "num_frames=5", "height=32", "width=32", "seed=0"),
        *("synthetic_clips=8", "global_batch_size=8", "ici_data_parallelism=4"),
        *(
            "ici_fsdp_parallelism=2",
            "sample_every=0",
            PAIRS,
            f"latent_cache_dir={folder / 'cache'}",
        ),
        f"checkpoint_dir={folder / 'checkpoints'}",
        f"metrics_file={folder / 'metrics.jsonl'}",
        f"jax_cache_dir={folder / 'compiled'}",
        *more,
    )


@pytest.mark.usefixtures("cache")
def test_two_processes_train_and_four_continue_and_export(tmp_path: Path) -> None:
    run(2, command(tmp_path, "max_train_steps=2"))
    model = tmp_path / "model"
    more = ("max_train_steps=4", f"export_dir={model}", "weights_dtype=float32")
    said = run(4, command(tmp_path, *more))
    assert "continuing after step 2" in said[0]
    assert all("continuing" not in one for one in said[1:])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    _, spec = open_wan_folder(model)
    assert spec.transformer == open_wan_folder(MODEL)[1].transformer
    new, old = (open_weights(folder / "transformer") for folder in (model, MODEL))
    assert {n: t.shape for n, t in new.tensors.items()} == {
        n: t.shape for n, t in old.tensors.items()
    }


def test_two_processes_with_one_context_train_as_one_device_does(tmp_path: Path) -> None:
    run(2, (WORKER, "train", tmp_path))
    losses = json.loads((tmp_path / "losses.json").read_text())
    np.testing.assert_allclose(losses, tiny.losses_alone(), rtol=RTOL)

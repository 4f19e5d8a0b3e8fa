"""Processes train as one device does, save, and continue in another number."""

import json
from pathlib import Path

import numpy as np

from maxdiffusion.checkpoints.safetensors_io import open_weights
from maxdiffusion.pipelines.spec import open_wan_folder
from tests.multihost.launching import ROOT, run
from tests.training import tiny_training as tiny
from tests.training.command_line import fill, losses_of, noise, small_run
from tests.training.test_step import RTOL

WORKER = ROOT / "tests" / "multihost" / "worker.py"
MODEL = ROOT / "tests" / "goldens" / "wan22_t2v"


def arguments(folder: Path, *more: str) -> list[str]:
    """A context of all devices: rings between halves of them, all-to-alls of four."""
    return small_run(
        MODEL,
        folder,
        *("model_name=wan2.2", "train_experts=high_noise", "attention=ulysses_ring_custom"),
        *("ici_data_parallelism=1", "ici_ring_parallelism=2", "ici_ulysses_parallelism=4"),
        "learning_rate_schedule_steps=4",  # of the whole run, whichever part of it is made
        f"checkpoint_dir={folder / 'checkpoints'}",
        f"metrics_file={folder / 'metrics.jsonl'}",
        *more,
    )


def test_two_processes_train_and_four_continue_as_one_device_would(tmp_path: Path) -> None:
    """Rings lead from process to process, and all-to-alls too if there are four of them."""
    fill(tmp_path / "cache", MODEL, noise())
    command = ("-m", "maxdiffusion.train_wan")
    run(2, (*command, *arguments(tmp_path, "max_train_steps=2")))
    model = tmp_path / "model"
    more = ("max_train_steps=4", f"export_dir={model}", "weights_dtype=float32")
    said = run(4, (*command, *arguments(tmp_path, *more)))
    assert "continuing after step 2" in said[0]
    assert all("continuing" not in one for one in said[1:])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    alone = losses_of(arguments(tmp_path, "max_train_steps=4"), 4, alone=True)
    np.testing.assert_allclose([line["learning/loss"] for line in lines], alone, rtol=RTOL)
    _, spec = open_wan_folder(model)
    assert spec.transformer == open_wan_folder(MODEL)[1].transformer
    new, old = (open_weights(folder / "transformer") for folder in (model, MODEL))
    assert {n: t.shape for n, t in new.tensors.items()} == {
        n: t.shape for n, t in old.tensors.items()
    }


def test_heads_are_traded_between_two_processes_as_on_one_device(tmp_path: Path) -> None:
    run(2, (WORKER, "train", tmp_path))
    losses = json.loads((tmp_path / "losses.json").read_text())
    np.testing.assert_allclose(losses, tiny.losses_alone(), rtol=RTOL)

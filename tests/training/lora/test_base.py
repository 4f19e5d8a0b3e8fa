"""The command trains adapters, continues exactly, starts from files and refuses other weights."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from maxdiffusion import WanPipeline, train_wan, train_wan_vae
from maxdiffusion.config.load import load_config
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.models.abstract import values_of
from maxdiffusion.pipelines.settings import PipelineSettings
from maxdiffusion.pipelines.spec import open_wan_folder
from maxdiffusion.training.checkpoints import check_base
from maxdiffusion.training.data.batches import SyntheticClips
from maxdiffusion.training.data.synthetic import ClipFormat
from maxdiffusion.training.lora.base import AdapterRun
from maxdiffusion.training.results import Model, SampleVideos
from maxdiffusion.training.settings import batch_shape, wan_training
from maxdiffusion.training.wan import Tokens
from tests.training.command_line import fill, noise, small_run
from tests.training.interrupted import (
    SHARDED,
    assert_moments_are_sharded,
    assert_same_end,
    run_until_killed,
    shared_programs,
)
from tests.training.test_train_images import changed_model

__all__ = ["shared_programs"]

MODEL = Path(__file__).parents[2] / "goldens" / "wan21_t2v"
CONFIG = Path(__file__).parents[3] / "configs" / "train_lora_embedded.yml"
FIRST = "pytorch_lora_weights.safetensors"


def arguments(tmp_path, model, *more):
    """The small run with the config of adapters, on a mesh that shards weights."""
    _, *small = small_run(
        model,
        tmp_path,
        *("ici_data_parallelism=4", "ici_fsdp_parallelism=2"),
        f"checkpoint_dir={tmp_path / 'checkpoints'}",
        f"metrics_file={tmp_path / 'metrics.jsonl'}",
        "export_dir=",
        *more,
    )
    return [str(CONFIG), *small]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["train_lora_rank=0"], "train_lora_rank='0': must be an integer >= 1"),
        (["train_lora_alpha=0"], "train_lora_alpha='0': must be a finite number > 0"),
        (["train_lora_modules=['to_qq']"], "has this name; there are attn1.to_q, attn1.to_k"),
        (["train_lora_modules=['ffn.net.1.proj']"], "The nearest is 'ffn.net.0.proj'"),
        (["train_lora_modules=['proj_out']"], "train_lora_modules='proj_out': no linear map"),
        (["train_lora_modules=[]"], "names no linear map"),
        (["train_from_scratch=true"], "train_from_scratch=True: train_lora trains adapters on"),
        (["train_text_encoder=true"], "train_text_encoder=True: train_lora trains adapters of"),
        (["text_encoder_learning_rate=1e-5"], "does not train the text encoder. Leave it out"),
        (["lora_rank=4"], "train_lora_rank is the rank of trained adapters"),
        (["train_lora=false"], "has a meaning for train_lora: true only. Set train_lora=true"),
        (["train_lora_from=nowhere"], "train_lora_from='nowhere'"),
    ],
)
def test_what_does_not_go_with_adapters_is_said_first(tmp_path, capsys, changes, message):
    assert train_wan.main(arguments(tmp_path, MODEL, *changes)) == 2
    assert message in capsys.readouterr().err


def test_an_adapter_for_both_experts_is_refused(tmp_path, capsys):
    where = ("model_name=wan2.2", "train_experts=shared", "num_frames=9", "height=64", "width=64")
    assert train_wan.main(arguments(tmp_path, "embedded", *where)) == 2
    assert "train_experts='shared': the experts of this model" in capsys.readouterr().err
    file = tmp_path / FIRST
    file.write_bytes(b"")
    start = ("train_experts=both", f"train_lora_from={file}")
    assert train_wan.main(arguments(tmp_path, "embedded", *where, *start)) == 2
    assert "is one file, and transformer and transformer_2" in capsys.readouterr().err


def test_checkpoints_of_adapters_and_of_all_weights_do_not_mix():
    base = {"weights of transformer": "1234"}
    with pytest.raises(ProblemsFound, match="checkpoint 3 is of a training of all weights"):
        check_base({"data": {}}, base, 3)  # as written before there were adapters
    with pytest.raises(ProblemsFound, match="train_lora=False: checkpoint 3 is of"):
        check_base({"base": base}, {}, 3)
    check_base({"base": base}, base, 3)


def test_an_autoencoder_has_no_adapters(tmp_path, capsys):
    assert train_wan_vae.main(arguments(tmp_path, MODEL)) == 2
    assert "train_lora=True: adapters are trained for transformers" in capsys.readouterr().err


@pytest.mark.slow
def test_samples_have_the_weights_that_the_file_gives_a_pipeline(tmp_path):
    config = load_config(arguments(tmp_path, MODEL, f"export_dir={tmp_path / 'lora'}"))
    folder, spec = open_wan_folder(MODEL)
    training = wan_training(config, spec, batch_shape(config, (2, 4, 4), 8), Tokens(empty=(1,)))
    run = AdapterRun(config=config, folder=folder, spec=spec, training=training)
    state, rng = run.initial_state({}), np.random.default_rng(2)
    means = state.ema["transformer"]
    for path, value in means.items():
        drawn = rng.standard_normal(value.shape).astype(np.float32)
        means[path] = jax.device_put(drawn, value.sharding)
    run.export(state)
    model = Model(
        config=config, folder=folder, spec=spec, training=training, frozen=run.frozen_values()
    )
    sampled = SampleVideos(model=model)._parameters(model.states(state))
    settings = PipelineSettings(attention="dot_product", lora_rank=4)
    pipeline = WanPipeline.from_pretrained(MODEL, settings=settings)
    pipeline.load_lora_weights(tmp_path / "lora")
    pipeline.apply_adapters()
    found, wanted = (
        values_of(one.transformers["transformer"]) for one in (sampled, pipeline.parameters)
    )
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(found[path]), err_msg=path)


@pytest.mark.slow
def test_a_killed_run_on_known_first_frames_continues_bit_for_bit(
    shared_programs, tmp_path, capsys
):
    model = changed_model(tmp_path / "model", {"expand_timesteps": True})
    fill(tmp_path / "cache", model, noise())

    def run(name, *more, where=model):
        return arguments(
            tmp_path,
            where,
            "max_train_steps=4",
            "checkpoint_every=2",
            "weights_dtype=bfloat16",
            "train_lora_modules=['attn1.to_q','ffn.net.2']",
            SHARDED,
            shared_programs,
            f"checkpoint_dir={tmp_path / name / 'checkpoints'}",
            f"export_dir={tmp_path / name / 'model'}",
            f"metrics_file={tmp_path / name / 'metrics.jsonl'}",
            *more,
        )

    def train(name, *more, where=model):
        return train_wan.main(run(name, *more, where=where))

    sampled = ("sample_every=4", "num_inference_steps=1", f"output_dir={tmp_path / 'samples'}")
    assert train("whole", *sampled) == 0
    assert (tmp_path / "samples" / "step_000004.mp4").stat().st_size > 0
    said = capsys.readouterr().out
    assert "LoRA: rank 4, alpha 8 (scale 2) of attn1.to_q" in said
    assert "trainable parameters" in said
    assert "in bfloat16, in 2 shards (fsdp)" in said
    assert_moments_are_sharded(tmp_path / "whole")
    run_until_killed(run("killed"), step=4, doing="saving")
    assert train("killed") == 0
    assert "continuing after step" in capsys.readouterr().out  # 2, unless the write was quick
    assert_same_end(tmp_path / "whole", tmp_path / "killed")
    whole = load_file(tmp_path / "whole" / "model" / FIRST)
    assert all(np.abs(value).max() > 0 for value in whole.values())
    # Adapters and their moments alone are saved.
    stored = (tmp_path / "whole" / "checkpoints" / "4" / "state" / "_METADATA").read_text()
    assert "lora_up" in stored
    assert "kernel" not in stored
    assert_starts_from_a_file(train, tmp_path, whole)
    assert_refuses_other_weights(train, tmp_path, capsys)


def assert_starts_from_a_file(train, tmp_path, whole):
    """Without a step, the adapters that a run starts from are those that it ends with."""
    again = (f"train_lora_from={tmp_path / 'whole' / 'model'}", "max_train_steps=0")
    assert train("again", *again) == 0
    for name, value in load_file(tmp_path / "again" / "model" / FIRST).items():
        np.testing.assert_array_equal(value, whole[name], err_msg=name)
    assert train("again", *again, "train_lora_rank=2") == 2
    assert train("again", *again, "train_lora_modules=['to_q']") == 2


def assert_refuses_other_weights(train, tmp_path, capsys):
    capsys.readouterr()
    other = shutil.copytree(tmp_path / "model", tmp_path / "other")
    file = other / "transformer" / "diffusion_pytorch_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert train("whole", where=other) == 2
    said = capsys.readouterr().err
    assert "weights of transformer=" in said
    assert "the adapters of checkpoint 4 were trained with" in said
    assert train("whole", "train_lora_alpha=4") == 2
    assert "train_lora_alpha='4': the adapters of checkpoint 4" in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_of_both_experts_learn(tmp_path):
    """Clips are brighter than all that the model in the package knows."""
    clips = SyntheticClips(clip=ClipFormat(frames=9, size=64), count=8, seed=0)
    rng = np.random.default_rng(0)
    fill(
        tmp_path / "cache",
        "embedded",
        lambda videos: 1.5 + 0.2 * rng.standard_normal((len(videos), 3, 8, 8, 16)),
        clips,
    )
    more = (
        "model_name=wan2.2",
        "train_experts=both",
        "num_frames=9",
        "height=64",
        "width=64",
        "max_train_steps=20",
        f"export_dir={tmp_path / 'lora'}",
    )
    assert train_wan.main(arguments(tmp_path, "embedded", *more)) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    low = [line["learning/loss"] for line in lines if line["part"] == "transformer_2"]
    assert np.mean(low[-3:]) < 0.7 * np.mean(low[:3])
    names = {path.name for path in (tmp_path / "lora").iterdir()}
    assert names == {FIRST, "pytorch_lora_weights_2.safetensors"}

"""One training step of adapters against torch, PEFT and AdamW; the written file in diffusers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.numpy import load_file

from maxdiffusion.checkpoints.lora_export import AdapterTensors
from maxdiffusion.config.load import load_config
from maxdiffusion.mesh import single_device_mesh
from maxdiffusion.models.wan.checkpoint import transformer_map
from maxdiffusion.pipelines.spec import open_wan_folder
from maxdiffusion.training.lora.adapters import lora_settings
from maxdiffusion.training.lora.base import AdapterRun
from maxdiffusion.training.loss import (
    ClipBatch,
    EvenWeighting,
    ExpertSchedule,
    NoiseLevels,
    TrainedExperts,
    add_noise,
    timestep_of,
)
from maxdiffusion.training.step import LearningRate, Optimiser
from maxdiffusion.training.text import EncodedBefore
from maxdiffusion.training.wan import BatchShape, StoredText, WanTraining
from tests.oracle.tiny_checkpoints import TextSize, TransformerSize, wan21_t2v, write_checkpoint
from tests.parity.loaded import channels_first
from tests.parity.test_lora_parity import pipeline_of
from tests.training.lora.test_base import CONFIG

SIZE, TEXT_WIDTH = TransformerSize(heads=2, head_dim=16, layers=2, ffn=48), 24
RANK, ALPHA, NAME = 4, 6.0, "transformer"
MODULES = ["attn1.to_q", "to_v", "to_out.0", "ffn.net.2"]
CLIPS, LATENT, TOKENS, TEXT_LENGTH = 2, (2, 4, 6), 5, 16
RATE, EPS = 1e-2, 1e-2
# Gradients are sums of up to 100 float32 terms of about 0.1; an update divides their error by EPS.
GRADIENT_TOLERANCE = 1e-6
UPDATE_TOLERANCE = RATE * GRADIENT_TOLERANCE / EPS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tiny = wan21_t2v(seed=6, transformer=SIZE, text=TextSize(width=TEXT_WIDTH, layers=1))
    return write_checkpoint(tmp_path_factory.mktemp("model") / "model", tiny)


def torch_adapters(folder, target):
    """A transformer of diffusers with drawn adapters of PEFT, which diffusers saves."""
    model = WanTransformer3DModel.from_pretrained(folder / NAME)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MODULES))
    torch.manual_seed(3)
    trained = {name: one for name, one in model.named_parameters() if "lora_" in name}
    for name, one in trained.items():
        torch.nn.init.normal_(one.data, std=0.1 if "lora_B" in name else 0.3)
        one.requires_grad_(True)
    WanPipeline.save_lora_weights(
        target,
        transformer_lora_layers=get_peft_model_state_dict(model),
        **_collate_lora_metadata({NAME: model}),
    )
    return model, trained


def adapter_run(folder, start, export):
    config = load_config(
        [
            str(CONFIG),
            f"pretrained_model_name_or_path={folder}",
            f"train_lora_rank={RANK}",
            f"train_lora_alpha={ALPHA}",
            f"train_lora_modules={MODULES}",
            f"train_lora_from={start}",
            f"export_dir={export}",
        ]
    )
    opened, spec = open_wan_folder(folder)
    training = WanTraining(
        transformer=spec.transformer,
        text_encoder=spec.text_encoder,
        batch=BatchShape(
            clips=CLIPS, latent=LATENT, caption_tokens=TOKENS, text_length=TEXT_LENGTH
        ),
        experts=ExpertSchedule(
            levels=NoiseLevels(shift=3.0), boundary=None, trained=TrainedExperts.SHARED
        ),
        weighting=EvenWeighting(),
        optimiser=Optimiser(
            learning_rate=LearningRate(peak=RATE, steps=1, warmup_share=0.0),
            eps=EPS,
            weight_decay=0.1,
            ema_decay=0.0,
        ),
        mesh=single_device_mesh(),
        text=StoredText(empty=np.zeros((TOKENS, TEXT_WIDTH), np.float32)),
        caption_dropout=0.0,
        lora=lora_settings(config, spec.transformer),
    )
    return AdapterRun(config=config, folder=opened, spec=spec, training=training)


def torch_step(model, trained, sample, rows):
    """Loss, gradients and parameters after one step of AdamW."""
    latents, wanted = (
        torch.tensor(channels_first(part)) for part in (sample.latents, sample.velocity)
    )
    text = torch.zeros(CLIPS, TEXT_LENGTH, TEXT_WIDTH)
    text[:, :TOKENS] = torch.from_numpy(rows)
    rule = torch.optim.AdamW(trained.values(), lr=RATE, eps=EPS, weight_decay=0.1)
    with torch.enable_grad():
        times = torch.tensor(np.asarray(timestep_of(sample.level)))
        found = model(latents, times, text, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(found, wanted)
        loss.backward()
    gradients = {name: one.grad.numpy().copy() for name, one in trained.items()}
    rule.step()
    return float(loss), gradients, (latents, times, text)


def as_file(run, values, file):
    """Our arrays under the names and in the layout of a file."""
    table = transformer_map(run.spec.transformer)
    entries = run.lora.entries(table)
    AdapterTensors(values=values, table=table, entries=entries, alpha=ALPHA).write(file)
    return load_file(file)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Already found a .peft_config.")
def test_a_step_equals_that_of_torch_and_the_file_loads_in_diffusers(folder, tmp_path):
    model, trained = torch_adapters(folder, tmp_path / "start")
    run = adapter_run(folder, tmp_path / "start", tmp_path / "end")
    rng = np.random.default_rng(1)
    latents = rng.standard_normal((CLIPS, *LATENT, 16)).astype(np.float32)
    rows = rng.standard_normal((CLIPS, TOKENS, TEXT_WIDTH)).astype(np.float32)
    state = run.initial_state(run.starting_files())
    start = jax.tree.map(jnp.copy, state.values[NAME])
    level_key, noise_key, _ = jax.random.split(state.step_key, 3)
    levels = run.training.experts.levels_of(NAME).draw(level_key, CLIPS)
    sample = add_noise(jnp.asarray(latents), levels, noise_key)
    wanted_loss, wanted, inputs = torch_step(model, trained, sample, rows)

    frozen = run.frozen_values()
    before = {path: np.asarray(one) for path, one in frozen[NAME].items()}
    batch = ClipBatch(latents=latents, captions=EncodedBefore(rows=rows))
    state, report = run.training.step(NAME, frozen)(state, batch)
    assert float(report.loss) == pytest.approx(wanted_loss, rel=1e-5)
    assert_equal_values(before, frozen[NAME])
    assert not [path for path in state.values[NAME] if "lora_" not in path]

    # The start is what diffusers wrote, to the bit; Adam's first moment is a tenth of a gradient.
    written = load_file(tmp_path / "start" / "pytorch_lora_weights.safetensors")
    assert_equal_values(written, as_file(run, start, tmp_path / "start.safetensors"))
    whole = {path: 10 * one for path, one in state.moments[NAME][0].mu.items()}
    gradients = as_file(run, whole, tmp_path / "gradients.safetensors")
    compare(gradients, wanted, GRADIENT_TOLERANCE)
    assert max(abs(one).max() for one in wanted.values()) > 100 * GRADIENT_TOLERANCE
    run.export(state)
    end = load_file(tmp_path / "end" / "pytorch_lora_weights.safetensors")
    compare(end, {name: one.detach().numpy() for name, one in trained.items()}, UPDATE_TOLERANCE)

    pipeline = pipeline_of(WanTransformer3DModel.from_pretrained(folder / NAME))
    base = pipeline.transformer(*inputs, return_dict=False)[0]
    pipeline.load_lora_weights(tmp_path / "end")
    found = pipeline.transformer(*inputs, return_dict=False)[0]
    after = model(*inputs, return_dict=False)[0]
    assert float((found - base).abs().max()) > 0.05
    np.testing.assert_allclose(found, after, atol=1e-4)
    config = pipeline.transformer.peft_config["default_0"]
    assert (config.r, config.lora_alpha) == (RANK, ALPHA)


def assert_equal_values(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, np.asarray(other[name]), err_msg=name)


def compare(found, wanted, tolerance):
    """Compares tensors of a file with PEFT's parameters."""
    named = {f"{NAME}.{name.replace('.default', '')}": one for name, one in wanted.items()}
    assert found.keys() == named.keys()
    for name, one in named.items():
        np.testing.assert_allclose(found[name], one, rtol=1e-4, atol=tolerance, err_msg=name)

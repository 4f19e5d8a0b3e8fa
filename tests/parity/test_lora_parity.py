"""LoRA files against diffusers with PEFT: velocities, stacked adapters and merged weights."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel, WanVACETransformer3DModel
from flax import nnx

from maxdiffusion import WanPipeline as OurPipeline
from maxdiffusion.checkpoints.load import ComponentSource, load_parameters
from maxdiffusion.checkpoints.lora import Adapter, LoraTargets, fuse, read_lora
from maxdiffusion.checkpoints.safetensors_io import FileReader, open_weights, whole
from maxdiffusion.mesh import single_device_mesh
from maxdiffusion.models.abstract import AbstractModel
from maxdiffusion.models.wan import WanTransformer, WanTransformerConfig
from maxdiffusion.models.wan.checkpoint import transformer_map
from maxdiffusion.models.wan.original import original_module
from maxdiffusion.pipelines.settings import PipelineSettings
from tests.oracle.arrays import normal
from tests.oracle.lora_files import LOADED_BY_DIFFUSERS, write_lora
from tests.oracle.pipeline import load_pipeline
from tests.oracle.tiny_checkpoints import (
    TextSize,
    TransformerSize,
    draw_parameters,
    make_scheduler,
    make_transformer,
    wan21_t2v,
    wan22_t2v,
    write_checkpoint,
)
from tests.parity.loaded import channels_last
from tests.parity.test_transformer_parity import run_ours

# As for the plain transformer; adapters move these velocities by 0.5 to 2.
TOLERANCE = 3e-5
SIZE, TEXT_WIDTH = TransformerSize(heads=2, head_dim=32, layers=2, ffn=96), 24
INPUTS = normal(1, 1, 16, 2, 4, 6), torch.tensor([600]), normal(2, 1, 20, TEXT_WIDTH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("transformer")
    make_transformer(SIZE, TEXT_WIDTH, seed=5).save_pretrained(path)
    return path


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def pipeline_of(model: torch.nn.Module) -> WanPipeline:
    """Returns diffusers' pipeline around a transformer alone; it loads LoRA files."""
    return WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=make_scheduler(3), transformer=model
    )


def their_pipeline(folder: Path) -> WanPipeline:
    return pipeline_of(WanTransformer3DModel.from_pretrained(folder))


def their_velocity(pipeline: WanPipeline) -> np.ndarray:
    return pipeline.transformer(*INPUTS, return_dict=False)[0].numpy()


def our_velocity(folder: Path, files: dict[Path, float]) -> np.ndarray:
    """Returns the velocity of our transformer, with these files fused while it was read."""
    config = WanTransformerConfig(
        heads=SIZE.heads,
        head_dim=SIZE.head_dim,
        layers=SIZE.layers,
        ffn_dim=SIZE.ffn,
        text_dim=TEXT_WIDTH,
    )
    model = AbstractModel.of(
        lambda rngs: WanTransformer(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs)
    )
    stored = open_weights(folder)
    shapes = {name: tensor.shape for name, tensor in stored.tensors.items()}
    targets = LoraTargets.of(shapes, original_module)
    fused = [Adapter(lora=read_lora(file, targets), strength=s) for file, s in files.items()]
    source = ComponentSource(
        stored=fuse(stored, fused), table=transformer_map(config), abstract=model.parameters
    )
    ours = nnx.merge(model.graph, load_parameters(source)[0])
    latents, timestep, text = INPUTS
    inputs = channels_last(latents), timestep.numpy(), text.numpy()
    return run_ours(ours, *inputs, single_device_mesh())


@pytest.mark.parametrize("dialect", LOADED_BY_DIFFUSERS)
def test_every_dialect_that_diffusers_loads(folder, tmp_path, dialect):
    file = tmp_path / "lora.safetensors"
    pipeline = their_pipeline(folder)
    write_lora(file, shapes_of(pipeline.transformer), dialect, seed=7)
    base = their_velocity(pipeline)
    pipeline.load_lora_weights(file, adapter_name="a")
    pipeline.set_adapters(["a"], [0.6])
    wanted = their_velocity(pipeline)
    assert abs(wanted - base).max() > 0.1
    found = our_velocity(folder, {file: 0.6})
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore:Already found a .peft_config.")
def test_two_files_at_once(folder, tmp_path):
    pipeline = their_pipeline(folder)
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_lora(first, shapes_of(pipeline.transformer), "diffusers", seed=1)
    write_lora(second, shapes_of(pipeline.transformer), "musubi", seed=2)
    pipeline.load_lora_weights(first, adapter_name="a")
    pipeline.load_lora_weights(second, adapter_name="b")
    last = their_velocity(pipeline)
    np.testing.assert_allclose(our_velocity(folder, {second: 1.0}), last, rtol=0, atol=TOLERANCE)
    pipeline.set_adapters(["a", "b"], [0.7, -0.4])
    found = our_velocity(folder, {first: 0.7, second: -0.4})
    np.testing.assert_allclose(found, their_velocity(pipeline), rtol=0, atol=TOLERANCE)


SIZES = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "ffn_dim": 48,
    "text_dim": TEXT_WIDTH,
}
MEMBERS = {
    "image 2.1": lambda: WanTransformer3DModel(
        **SIZES, in_channels=36, image_dim=20, added_kv_proj_dim=32
    ),
    "5B": lambda: WanTransformer3DModel(**SIZES, in_channels=48, out_channels=48),
    "VACE": lambda: WanVACETransformer3DModel(**SIZES, vace_layers=[0], vace_in_channels=96),
}


# diffusers' converter of original names knows no control blocks.
@pytest.mark.parametrize(
    ("member", "dialect"),
    [(m, d) for m in MEMBERS for d in ("diffusers", "lightx2v") if (m, d) != ("VACE", "lightx2v")],
)
def test_merged_weights_of_the_family(tmp_path, member, dialect):
    model = draw_parameters(MEMBERS[member](), seed=3)
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "lora.safetensors"
    write_lora(file, shapes_of(model), dialect, seed=4)
    stored = open_weights(tmp_path / "model")
    pipeline = pipeline_of(model)
    pipeline.load_lora_weights(file, adapter_name="a")
    pipeline.set_adapters(["a"], [0.6])
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    lora = read_lora(file, LoraTargets.of(shapes_of(model), original_module))
    lora.check(strict=True)
    patched = fuse(stored, [Adapter(lora=lora, strength=0.6)])
    with FileReader() as reader:
        for name, wanted in pipeline.transformer.state_dict().items():
            tensor = patched.tensors[name]
            values = reader.read(tensor, whole(tensor.shape)).astype(np.float32)
            for patch in patched.patches.get(name, ()):
                values = patch.apply(values, whole(tensor.shape), reader)
            np.testing.assert_allclose(values, wanted, atol=2e-6, err_msg=name)


RUN = {
    "prompt": "a small robot walks",
    "negative_prompt": "static",
    "height": 16,
    "width": 32,
    "num_frames": 1,
    "num_inference_steps": 4,
    "guidance_scale": 3.0,
}


@pytest.mark.slow
def test_whole_runs_with_an_adapter_for_each_expert(tmp_path):
    tiny = wan22_t2v(seed=9, transformer=SIZE, text=TextSize(width=TEXT_WIDTH, layers=1))
    folder = write_checkpoint(tmp_path / "model", tiny)
    settings = PipelineSettings(attention="dot_product")
    theirs, ours = load_pipeline(folder), OurPipeline.from_pretrained(folder, settings=settings)
    high, low = tmp_path / "high.safetensors", tmp_path / "low.safetensors"
    write_lora(high, shapes_of(theirs.transformer), "lightx2v", seed=1)
    write_lora(low, shapes_of(theirs.transformer_2), "musubi", seed=2)
    start = normal(3, 1, 16, 1, 2, 4)

    def latents(pipeline, noise):
        found = pipeline(**RUN, latents=noise, output_type="latent").frames
        return np.asarray(found)

    def differ(case):
        wanted, found = latents(theirs, start), latents(ours, start.numpy())
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4, err_msg=case)
        return found

    base = differ("without adapters")
    for pipeline in (theirs, ours):
        pipeline.load_lora_weights(high, adapter_name="high")
        pipeline.load_lora_weights(low, adapter_name="low", load_into_transformer_2=True)
    assert abs(differ("as loaded") - base).max() > 0.05
    for pipeline in (theirs, ours):
        pipeline.set_adapters(["high", "low"], [0.8, 0.3])
    strong = differ("at strengths")
    for pipeline in (theirs, ours):
        pipeline.fuse_lora(components=["transformer", "transformer_2"])
        pipeline.unload_lora_weights()
    np.testing.assert_array_equal(differ("fused and unloaded"), strong)


@pytest.mark.slow
def test_adapters_that_are_kept_low_rank(tmp_path):
    folder = write_checkpoint(
        tmp_path / "model", wan21_t2v(seed=4, transformer=SIZE, text=TextSize(layers=1))
    )
    theirs = load_pipeline(folder)
    settings = PipelineSettings(attention="dot_product", lora_rank=8)
    ours = OurPipeline.from_pretrained(folder, settings=settings)
    start, file = normal(3, 1, 16, 1, 2, 4), tmp_path / "lora.safetensors"
    write_lora(file, shapes_of(theirs.transformer), "lightx2v")
    run = lambda: ours(**RUN, latents=start.numpy(), output_type="latent").frames  # noqa: E731
    base, programs = run(), len(ours._programs)
    for pipeline in (theirs, ours):
        pipeline.load_lora_weights(file, adapter_name="a")
        pipeline.set_adapters("a", 0.6)
    wanted = np.asarray(theirs(**RUN, latents=start, output_type="latent").frames)
    assert abs(wanted - base).max() > 0.05
    np.testing.assert_allclose(run(), wanted, rtol=0, atol=1e-4)
    ours.unload_lora_weights()
    np.testing.assert_array_equal(run(), base)
    assert len(ours._programs) == programs  # nothing was compiled for it

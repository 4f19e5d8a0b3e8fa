"""Original files of Animate: cut and reshaped as diffusers' converter does, strictly; they run."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from PIL import Image
from safetensors.numpy import load_file, save_file

from maxdiffusion import WanAnimatePipeline
from maxdiffusion.checkpoints.load import ComponentSource, LoadOptions, load_parameters
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.models.abstract import values_of
from maxdiffusion.models.wan.checkpoint import transformer_map
from maxdiffusion.pipelines.settings import Precision
from maxdiffusion.pipelines.spec import TransformerFiles, open_wan_folder, wan_models
from tests.oracle.original_tensors import CONVOLUTIONS, original_tensors
from tests.oracle.tiny_checkpoints import TransformerSize, VaeSize
from tests.oracle.tiny_family import wan22_animate, write_family

FUSED = "face_adapter.fuser_blocks.1.linear1_kv"
FP8 = ml_dtypes.float8_e4m3fn


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint whose motion encoder has the depth of the released one."""
    tiny = wan22_animate(
        7,
        face_size=512,
        every=1,
        transformer=TransformerSize(heads=2, head_dim=16, layers=2, ffn=48),
        vae=VaeSize(base=4, multipliers=(1, 1, 2, 2), res_blocks=1),
    )
    return write_family(tmp_path_factory.mktemp("animate"), tiny)


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, np.ndarray]:
    (file,) = (folder / "transformer").glob("*.safetensors")
    return load_file(file)


def parameters_of(folder, file=None, shape=None):
    """The parameters of a folder, with the weights of a file if there is one."""
    opened, spec = open_wan_folder(folder, TransformerFiles(first=str(file)) if file else None)
    source = ComponentSource(
        stored=opened.weights["transformer"],
        table=transformer_map(spec.transformer),
        abstract=wan_models(spec, Precision()).transformer.parameters,
    )
    mesh = None if shape is None else build_mesh(shape)
    # Reads of a few rows each: halves of a tensor begin in the middle of one.
    return values_of(load_parameters(source, mesh=mesh, options=LoadOptions(read_bytes=500))[0])


def problems_of(folder, file, values):
    save_file(values, file)
    with pytest.raises(ProblemsFound) as caught:
        open_wan_folder(folder, TransformerFiles(first=str(file)))
    return [str(problem) for problem in caught.value.problems]


def test_the_converter_of_diffusers_undoes_the_original_layout(tensors):
    stored = {name: torch.tensor(value) for name, value in original_tensors(tensors).items()}
    converted = convert_wan_transformer_to_diffusers(stored)
    converted = {n: v.numpy() for n, v in converted.items() if not n.endswith(".kernel")}
    assert converted.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(converted[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("prefix", "shape"), [("", None), ("model.diffusion_model.", MeshShape(fsdp=2, tensor=4))]
)
def test_the_same_weights(folder, tensors, tmp_path, prefix, shape):
    file = tmp_path / "any.safetensors"
    save_file({prefix + n: v for n, v in original_tensors(tensors).items()}, file)
    jax.tree.map(
        np.testing.assert_array_equal, parameters_of(folder, file, shape), parameters_of(folder)
    )


def test_files_without_blurs(folder, tensors, tmp_path):
    """Other programs do not store them."""
    file = tmp_path / "any.safetensors"
    save_file({n: v for n, v in original_tensors(tensors).items() if ".kernel" not in n}, file)
    jax.tree.map(np.testing.assert_array_equal, parameters_of(folder, file), parameters_of(folder))


@pytest.mark.parametrize("per_row", [False, True])
def test_scaled_weights(folder, tensors, tmp_path, per_row):
    """8-bit keys and values have one scale, or one for each of their rows."""
    stored, meant = original_tensors(tensors), dict(tensors)
    whole = stored[f"{FUSED}.weight"]
    largest = np.abs(whole).max(1) if per_row else np.abs(whole).max()[None]
    scale = (largest / 448).astype(np.float32)
    stored[f"{FUSED}.weight"] = (whole / scale[:, None]).astype(FP8)
    stored[f"{FUSED}.scale_weight"] = scale
    stored["scaled_fp8"] = np.zeros(2, FP8)
    values = stored[f"{FUSED}.weight"].astype(np.float32) * scale[:, None]
    meant["face_adapter.1.to_k.weight"], meant["face_adapter.1.to_v.weight"] = np.split(values, 2)
    save_file(stored, tmp_path / "original.safetensors")
    save_file(meant, tmp_path / "diffusers.safetensors")
    jax.tree.map(
        np.testing.assert_array_equal,
        parameters_of(folder, tmp_path / "original.safetensors"),
        parameters_of(folder, tmp_path / "diffusers.safetensors"),
    )


def test_all_differences_are_listed(folder, tensors, tmp_path):
    stored = original_tensors(tensors)
    del stored[f"{FUSED}.bias"]
    fused = "face_adapter.fuser_blocks.0.linear1_kv.weight"
    stored[fused] = stored[fused][:-2]
    bias = f"{CONVOLUTIONS}.1.conv1.1.bias"
    stored[bias] = stored[bias].reshape(-1, 1, 1, 1)
    stored["face_encoder.extra.weight"] = np.zeros(3, np.float32)
    said = "\n".join(problems_of(folder, tmp_path / "a.safetensors", stored))
    for part in (
        f"a.safetensors: {FUSED}.bias='missing'",
        f"a.safetensors: {fused}='mis-shaped': must have shape [32, 32], found [31, 32]",
        f"a.safetensors: {bias}='mis-shaped': must have shape [4], found [4, 1, 1, 1]",
        "a.safetensors: face_encoder.extra.weight='unexpected'",
    ):
        assert part in said
    assert said.count("\n") == 3


def test_another_blur_is_refused(folder, tensors, tmp_path):
    stored = original_tensors(tensors)
    name = f"{CONVOLUTIONS}.2.skip.0.kernel"
    stored[name] = stored[name] * np.float32(4)
    (said,) = problems_of(folder, tmp_path / "a.safetensors", stored)
    assert f"a.safetensors: {name}='F32[4, 4]': must be that of the released model" in said


def test_a_file_of_another_size_or_member_is_named(folder, tensors, tmp_path):
    stored = original_tensors(tensors)
    text = {n: v for n, v in stored.items() if not n.startswith(("face", "motion", "pose"))}
    said = "\n".join(problems_of(folder, tmp_path / "a.safetensors", text))
    assert "face_adapters=0: is 2 in" in said
    assert "a WAN 2.1 image-to-video model" in said
    fewer = {n: v for n, v in stored.items() if not n.startswith(f"{CONVOLUTIONS}.7.")}
    said = "\n".join(problems_of(folder, tmp_path / "a.safetensors", fewer))
    assert "motion_encoder_size=256: is 512 in" in said
    assert "an Animate model" in said


@pytest.fixture
def quick_compiles():
    """Compiles in half the time: both runs are short, and are compared with each other alone."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiles")
def test_a_run_is_that_of_the_folder(folder, tensors, tmp_path):
    save_file(original_tensors(tensors), tmp_path / "wan_animate.safetensors")
    files = TransformerFiles(first=str(tmp_path / "wan_animate.safetensors"))
    pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), np.uint8)
    frames = [Image.fromarray(frame) for frame in pixels]
    made = [
        WanAnimatePipeline.from_pretrained(folder, transformers=given)(
            image=frames[0],
            pose_video=frames,
            face_video=frames,
            prompt="A dancer",
            height=32,
            width=32,
            segment_frame_length=5,
            num_inference_steps=1,
            seed=3,
            output_type="latent",
        ).frames
        for given in (None, files)
    ]
    assert np.std(made[0]) > 0.1
    np.testing.assert_array_equal(*made)

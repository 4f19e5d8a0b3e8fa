"""Pipelines whose transformers come from original files: the same weights, or one whole report."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxdiffusion.checkpoints.diffusers_folder import component_digests
from maxdiffusion.config.load import read_config
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.generation.job import resolve_job
from maxdiffusion.models.abstract import values_of
from maxdiffusion.models.wan.original import original_name
from maxdiffusion.pipelines.programs import ProgramBuilder
from maxdiffusion.pipelines.settings import PipelineSettings
from maxdiffusion.pipelines.spec import TransformerFiles, open_wan_folder
from maxdiffusion.pipelines.weights import load_wan_parameters
from tests.checkpoints.small_model import mesh
from tests.config.writing import write

pytestmark = pytest.mark.slow

GOLDENS = Path(__file__).parents[1] / "goldens"
WAN21, WAN22 = GOLDENS / "wan21_t2v", GOLDENS / "wan22_t2v"
WEIGHTS = "diffusion_pytorch_model.safetensors"


def original_tensors(folder, component="transformer", prefix=""):
    """The tensors of a component under the original names."""
    stored = load_file(folder / component / WEIGHTS)
    return {prefix + original_name(name): value for name, value in stored.items()}


def original_folder(target, source):
    """Writes both experts in Wan-AI's layout, in shards with an index."""
    for component, name in (
        ("transformer", "high_noise_model"),
        ("transformer_2", "low_noise_model"),
    ):
        values = original_tensors(source, component)
        (target / name).mkdir(parents=True)
        shards = [f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)]
        names = sorted(values)
        weight_map = {}
        for number, shard in enumerate(shards):
            save_file({n: values[n] for n in names[number::2]}, target / name / shard)
            weight_map |= dict.fromkeys(names[number::2], shard)
        index = target / name / f"{WEIGHTS}.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        (target / name / "config.json").write_text('{"_class_name": "WanModel"}')
    return target


def transformers_of(location, files=None, sizes=None):
    folder, spec = open_wan_folder(location, files)
    where = mesh(**(sizes or {}))
    builder = ProgramBuilder(spec=spec, settings=PipelineSettings(), mesh=where)
    loaded = load_wan_parameters(folder, builder)
    return {name: values_of(state) for name, state in loaded.parameters.transformers.items()}


def assert_same(first, second):
    assert list(first) == list(second)
    for name in first:
        jax.tree.map(np.testing.assert_array_equal, first[name], second[name])


def problems_of(location, files):
    with pytest.raises(ProblemsFound) as caught:
        open_wan_folder(location, files)
    return [str(problem) for problem in caught.value.problems]


def without_transformers(tmp_path, source):
    """A copy of a model with the configs of its transformers, but without their weights."""
    base = tmp_path / "base"
    shutil.copytree(source, base)
    for file in base.glob("transformer*/*.safetensors"):
        file.unlink()
    return base


@pytest.mark.parametrize("sizes", [None, {"fsdp": 2, "ring": 2, "tensor": 2}], ids=str)
def test_both_experts_from_wan_ai_s_layout(tmp_path, sizes):
    files = TransformerFiles(first=str(original_folder(tmp_path / "original", WAN22)))
    base = without_transformers(tmp_path, WAN22)
    assert_same(transformers_of(base, files, sizes), transformers_of(WAN22))


def test_a_single_file_for_one_expert_or_for_each(tmp_path):
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    save_file(original_tensors(WAN22, prefix="model.diffusion_model."), one)
    save_file(original_tensors(WAN22, "transformer_2"), two)
    files = TransformerFiles(first=str(one), second=str(two))
    assert_same(transformers_of(WAN22, files), transformers_of(WAN22))
    swapped = transformers_of(WAN22, TransformerFiles(first=str(two), second=str(one)))
    assert_same(
        {"transformer": swapped["transformer_2"]},
        {"transformer": transformers_of(WAN22)["transformer"]},
    )


def test_scaled_eight_bit_weights(tmp_path):
    stored, meant = {}, {}
    for name, value in original_tensors(WAN21).items():
        value = value.astype(np.float32)
        if value.ndim == 2 and name.startswith("blocks."):
            scale = np.float32(np.abs(value).max() / 448)
            stored[name] = (value / scale).astype(ml_dtypes.float8_e4m3fn)
            stored[name.replace(".weight", ".scale_weight")] = np.full((), scale)
            meant[name] = stored[name].astype(np.float32) * scale
        else:
            stored[name] = meant[name] = value
    stored["scaled_fp8"] = np.zeros(0, ml_dtypes.float8_e4m3fn)
    save_file(stored, tmp_path / "fp8.safetensors")
    save_file(meant, tmp_path / "float.safetensors")
    first, second = (
        transformers_of(WAN21, TransformerFiles(first=str(tmp_path / f"{kind}.safetensors")))
        for kind in ("fp8", "float")
    )
    assert_same(first, second)


def test_everything_that_differs_is_in_one_report(tmp_path):
    values = original_tensors(WAN21)
    del values["blocks.0.self_attn.q.weight"]
    values["blocks.0.cross_attn.k_img.weight"] = np.zeros((128, 128), np.float32)
    values["head.head.bias"] = np.zeros(3, np.float32)
    values["somewhere.else"] = np.zeros(3, np.float32)
    values["patch_embedding.weight"] = np.zeros((128, 36, 1, 2, 2), np.float32)
    save_file(values, tmp_path / "odd.safetensors")
    said = "\n".join(problems_of(WAN21, TransformerFiles(first=str(tmp_path / "odd.safetensors"))))
    for part in (
        "odd.safetensors: in_channels=36: is 16 in",
        "2.2 image-to-video",
        "blocks.0.self_attn.q.weight='missing'",
        "k_img.weight='unexpected'",
        "head.head.bias='mis-shaped'",
        "somewhere.else='unexpected'",
        "patch_embedding.weight='mis-shaped': must have shape [128, 16, 1, 2, 2]",
    ):
        assert part in said


def test_a_config_names_the_files(tmp_path):
    folder = original_folder(tmp_path / "original", WAN22)
    path = write(
        tmp_path,
        f"pretrained_model_name_or_path: {WAN22}\nheight: 16\nwidth: 16\nnum_frames: 1\n"
        f"wan_transformer_pretrained_model_name_or_path: {folder}\noutput_dir: {tmp_path}\n",
    )
    _, opened = resolve_job(read_config([path]))
    assert opened.weights["transformer_2"].folder == folder / "low_noise_model"
    digests = component_digests(opened)
    plain = component_digests(open_wan_folder(WAN22)[0])
    differing = {name for name in plain if plain[name] != digests[name]}
    assert differing == {"checkpoint transformer", "checkpoint transformer_2"}
    bad = read_config([path, f"wan_transformer_pretrained_model_name_or_path={folder / 'gone'}"])
    with pytest.raises(ProblemsFound, match=r"is not a .safetensors file, a folder or a place"):
        resolve_job(bad)

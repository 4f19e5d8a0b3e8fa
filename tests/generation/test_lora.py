"""The public keys `enable_lora` and `lora_config`: files, experts and strengths, or one report."""

from pathlib import Path

import pytest

from maxdiffusion.checkpoints.diffusers_folder import component_digests
from maxdiffusion.config.load import read_config
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.generation.job import resolve_job
from maxdiffusion.generation.lora import lora_choices
from maxdiffusion.pipelines.spec import open_wan_folder
from tests.config.writing import write
from tests.oracle.lora_files import write_lora

GOLDENS = Path(__file__).parents[1] / "goldens"
ONE, TWO = ("transformer",), ("transformer", "transformer_2")


def chosen(table, experts):
    return [
        (one.component, one.location, one.weight_name, one.strength)
        for one in lora_choices(table, experts)
    ]


def problems_of(table, experts):
    with pytest.raises(ProblemsFound) as caught:
        lora_choices(table, experts)
    return [str(problem) for problem in caught.value.problems]


def test_one_transformer():
    table = {
        "rank": (64,),
        "lora_model_name_or_path": ("first", "second"),
        "weight_name": ("a.safetensors", ""),
        "adapter_name": ("x", "y"),
        "scale": (0.5, 1.0),
        "from_pt": (),
    }
    assert chosen(table, ONE) == [
        ("transformer", "first", "a.safetensors", 0.5),
        ("transformer", "second", "", 1.0),
    ]


def test_files_of_the_experts():
    table = {
        "lora_model_name_or_path": ("place", "other"),
        "high_noise_weight_name": ("high", ""),
        "low_noise_weight_name": ("low", "only_low"),
        "scale": (0.5, 2.0),
        "low_noise_scale": (0.25, 1.0),
    }
    assert chosen(table, TWO) == [
        ("transformer", "place", "high", 0.5),
        ("transformer_2", "place", "low", 0.25),
        ("transformer_2", "other", "only_low", 1.0),
    ]


def test_one_file_for_both_experts():
    table = {"lora_model_name_or_path": ("a.safetensors",), "high_noise_scale": (0.3,)}
    assert chosen(table, TWO) == [
        ("transformer", "a.safetensors", "", 0.3),
        ("transformer_2", "a.safetensors", "", 1.0),
    ]


def test_everything_wrong_with_it():
    assert "must name a LoRA file" in problems_of({}, ONE)[0]
    assert "must name a LoRA file" in problems_of({"lora_model_name_or_path": ("",)}, ONE)[0]
    table = {
        "lora_model_name_or_path": ("a", "b"),
        "scale": (1.0,),
        "weight_name": ("x", "y", "z"),
        "high_noise_weight_name": ("h", "i"),
    }
    said = "\n".join(problems_of(table, ONE))
    assert "lora_config.scale=[1.0]: must have 2 entries" in said
    assert "lora_config.weight_name=" in said
    assert "high_noise_weight_name=('h', 'i'): this model has one transformer" in said


@pytest.fixture
def lora(tmp_path):
    """Two files for the experts of the tiny model."""
    weights = open_wan_folder(GOLDENS / "wan22_t2v")[0].weights["transformer"]
    shapes = {name: tensor.shape for name, tensor in weights.tensors.items()}
    for seed, name in enumerate(("high", "low")):
        write_lora(tmp_path / f"{name}.safetensors", shapes, "lightx2v", seed=seed)
    return tmp_path


def parsed(folder, *arguments):
    path = write(
        folder,
        f"pretrained_model_name_or_path: {GOLDENS / 'wan22_t2v'}\nheight: 16\nwidth: 16\n"
        f"num_frames: 1\nenable_lora: true\noutput_dir: {folder}\nlora_config:\n"
        f"  lora_model_name_or_path: [{folder}]\n  high_noise_weight_name: [high.safetensors]\n"
        "  low_noise_weight_name: [low.safetensors]\n  scale: [0.8]\n  low_noise_scale: [0.3]\n",
    )
    return read_config([path, *arguments])


def test_a_job_fuses_its_files(lora, caplog):
    _, folder = resolve_job(parsed(lora))
    high, low = (folder.weights[name] for name in TWO)
    assert high.patch_notes == ("high.safetensors at 0.8, 54 tensors",)
    assert low.patch_notes == ("low.safetensors at 0.3, 54 tensors",)
    assert "pairs of rank 4" in caplog.text
    plain = component_digests(open_wan_folder(GOLDENS / "wan22_t2v")[0])
    found = component_digests(folder)
    assert {name for name in plain if plain[name] != found[name]} == {
        "checkpoint transformer",
        "checkpoint transformer_2",
    }


def test_problems_come_before_the_weights(lora):
    said = parsed(lora, 'lora_config.low_noise_weight_name=["gone.safetensors"]', "height=17")
    with pytest.raises(ProblemsFound) as caught:
        resolve_job(said)
    names = [problem.name for problem in caught.value.problems]
    assert {"lora_config", "height"} <= set(names)


def test_strictness_is_a_choice(lora):
    small = open_wan_folder(GOLDENS / "wan22_t2v")[0].weights["transformer"]
    shapes = {name: tensor.shape for name, tensor in small.tensors.items()}
    shapes["blocks.0.attn2.add_k_proj.weight"] = (128, 128)
    write_lora(lora / "high.safetensors", shapes, "diffusers")
    with pytest.raises(ProblemsFound, match=r"the model has no blocks.0.attn2.add_k_proj"):
        resolve_job(parsed(lora))
    _, folder = resolve_job(parsed(lora, "lora_strict=false"))
    assert folder.weights["transformer"].patches

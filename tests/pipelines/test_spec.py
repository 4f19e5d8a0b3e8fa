"""What a checkpoint folder says about itself, and every way in which it cannot be run."""

import json
import shutil
from pathlib import Path

import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.pipelines.spec import open_wan_folder

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture
def folder(tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(GOLDENS / "wan22_t2v", copy)
    return copy


def change(file: Path, **values):
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **values}))


def problems_of(folder: Path) -> str:
    with pytest.raises(ProblemsFound) as caught:
        open_wan_folder(folder)
    return str(caught.value)


def test_two_experts_and_their_boundary():
    _, spec = open_wan_folder(GOLDENS / "wan22_t2v")
    assert spec.experts == ("transformer", "transformer_2")
    assert spec.boundary_ratio == 0.875
    assert (spec.transformer.heads, spec.transformer.head_dim) == (4, 32)


def test_one_transformer():
    _, spec = open_wan_folder(GOLDENS / "wan21_t2v")
    assert spec.experts == ("transformer",)
    assert spec.boundary_ratio is None


def test_other_pipelines_are_refused(folder):
    change(folder / "model_index.json", _class_name="FluxPipeline")
    assert "_class_name='FluxPipeline': must be one of WanPipeline" in problems_of(folder)


def test_experts_of_different_sizes_are_refused(folder):
    change(folder / "transformer_2" / "config.json", num_layers=3)
    assert "both experts must have the same sizes" in problems_of(folder)


def test_two_experts_need_a_boundary(folder):
    change(folder / "model_index.json", boundary_ratio=None)
    assert "boundary_ratio=None" in problems_of(folder)
    change(folder / "model_index.json", boundary_ratio=1.5)
    assert "must be between 0 and 1" in problems_of(folder)


def test_a_missing_expert_is_named(folder):
    shutil.rmtree(folder / "transformer_2")
    assert "component transformer_2" in problems_of(folder)


def test_parts_of_different_models_are_refused(folder):
    change(folder / "transformer" / "config.json", in_channels=20)
    change(folder / "transformer_2" / "config.json", in_channels=20)
    assert "transformer in_channels=20: must equal the VAE's z_dim" in problems_of(folder)
    assert "16 or 36" in problems_of(folder)


def test_all_problems_come_at_once(folder):
    change(folder / "model_index.json", boundary_ratio=2)
    change(folder / "vae" / "config.json", attn_scales=[1.0])
    change(folder / "text_encoder" / "config.json", feed_forward_proj="relu")
    report = problems_of(folder)
    assert all(word in report for word in ("boundary_ratio", "attn_scales", "feed_forward_proj"))

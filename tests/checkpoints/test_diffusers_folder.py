"""Model folders are checked whole, and everything that is wrong comes at once."""

import json

import pytest

from maxdiffusion.checkpoints.diffusers_folder import (
    EMBEDDED,
    is_hub_id,
    open_model_folder,
    patterns,
)
from maxdiffusion.errors import ProblemsFound
from tests.checkpoints.small_model import save, tensors

INDEX = {
    "_class_name": "WanPipeline",
    "boundary_ratio": 0.875,
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
    "image_encoder": [None, None],
}
COMPONENTS = ("scheduler", "tokenizer", "transformer", "vae")


@pytest.fixture
def model(tmp_path):
    root = tmp_path / "model"
    for name in ("transformer", "vae"):
        save(root / name, tensors())
    for name, file in (("scheduler", "scheduler_config.json"), ("tokenizer", "tokenizer.json")):
        (root / name).mkdir()
        (root / name / file).write_text('{"flow_shift": 3.0}')
    (root / "model_index.json").write_text(json.dumps(INDEX))
    return root


def problems_of(location, **options):
    with pytest.raises(ProblemsFound) as caught:
        open_model_folder(location, **options)
    return [str(problem) for problem in caught.value.problems]


def test_a_sound_folder(model):
    folder = open_model_folder(str(model))
    assert folder.components == COMPONENTS
    assert folder.index["boundary_ratio"] == 0.875
    assert folder.configs["scheduler"]["flow_shift"] == 3.0
    assert folder.configs["transformer"]["_class_name"] == "SmallModel"
    assert set(folder.weights) == {"transformer", "vae"}
    assert folder.path("tokenizer", "tokenizer.json").is_file()


def test_only_needed_components_are_opened(model):
    (model / "transformer" / "config.json").unlink()
    assert open_model_folder(model, needed=("vae",)).components == ("vae",)


def test_all_problems_come_at_once(model):
    (model / "transformer" / "config.json").unlink()
    (model / "vae" / "config.json").write_text("{")
    (model / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    (model / "tokenizer" / "tokenizer.json").unlink()
    (model / "scheduler" / "scheduler_config.json").write_text("[]")
    with pytest.raises(ProblemsFound) as caught:
        open_model_folder(model, needed=(*COMPONENTS, "transformer_2", "image_encoder"))
    text = str(caught.value)
    assert len(caught.value.problems) == 7
    for part in (
        "transformer/config.json': is missing",
        "vae/config.json': must be JSON",
        "vae': has no .safetensors file",
        "tokenizer.json': is missing",
        "scheduler_config.json': must hold a JSON object, not a list",
        "component transformer_2=",
        "component image_encoder=",
    ):
        assert part in text, (part, text)


def test_a_listed_component_without_a_folder(model):
    for file in (model / "vae").iterdir():
        file.unlink()
    (model / "vae").rmdir()
    (problem,) = problems_of(model)
    assert "component vae=" in problem
    assert "has no folder" in problem


@pytest.mark.parametrize("content", [None, "{", "3"])
def test_model_index_missing_or_damaged(model, content):
    index = model / "model_index.json"
    index.unlink() if content is None else index.write_text(content)
    (problem,) = problems_of(model)
    assert "model_index.json" in problem


def test_no_folder_at_all(tmp_path):
    (problem,) = problems_of(str(tmp_path / "absent"))
    assert "pretrained_model_name_or_path=" in problem
    assert "does not exist" in problem
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file" in problems_of(file)[0]


@pytest.mark.parametrize("unreadable", ["model", "vae"])
def test_folders_without_permission(model, monkeypatch, unreadable):
    # Permissions do not bind the superuser, who may run this; so the answer of the system is set.
    monkeypatch.setattr("os.access", lambda path, mode: path.name != unreadable)
    (problem,) = problems_of(model)
    assert "cannot be read" in problem
    assert unreadable in problem


def test_only_ids_without_a_folder_are_remote(model, monkeypatch):
    monkeypatch.chdir(model.parent)
    assert is_hub_id("owner/model")
    assert not is_hub_id("model/vae")
    assert not is_hub_id("/absent/folder")
    assert not is_hub_id("embedded")


def test_a_hub_id_while_offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (problem,) = problems_of("owner/model")
    assert "pretrained_model_name_or_path='owner/model'" in problem
    assert "the hub cannot be reached" in problem


def test_a_hub_id_brings_only_what_is_needed(monkeypatch, model):
    asked = {}

    def snapshot_download(repository, allow_patterns):
        asked[repository] = allow_patterns
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert open_model_folder("owner/model", needed=("vae",)).root == model
    assert asked == {"owner/model": patterns(("vae",))}
    assert "vae/*.safetensors" in patterns(("vae",))
    assert not any("transformer" in pattern for pattern in patterns(("vae",)))


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_embedded_models_are_whole(name):
    folder = open_model_folder(name)
    assert {"transformer", "vae", "text_encoder"} <= set(folder.weights)

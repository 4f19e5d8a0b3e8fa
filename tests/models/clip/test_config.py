"""Reading the config.json of an image encoder."""

import pytest
from transformers import CLIPVisionConfig

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.models.clip import ClipVisionConfig


def test_the_defaults_are_vit_h_14():
    released = {
        "model_type": "clip_vision_model",
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_channels": 3,
        "image_size": 224,
        "patch_size": 14,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "projection_dim": 1024,
        "torch_dtype": "bfloat16",
    }
    config = ClipVisionConfig.from_transformers(released)
    assert config == ClipVisionConfig()
    assert (config.tokens, config.used_layers, config.head_dim) == (257, 31, 80)


def test_missing_keys_have_the_defaults_of_transformers():
    theirs = CLIPVisionConfig().to_dict()
    assert ClipVisionConfig.from_transformers({}) == ClipVisionConfig.from_transformers(theirs)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", 770),
        ("num_hidden_layers", 1),
        ("num_hidden_layers", None),
        ("image_size", 16),
        ("image_size", [224, 224]),
        ("patch_size", 14.0),
        ("hidden_act", "gelu_new"),
        ("layer_norm_eps", "1e-5"),
        ("model_type", "clip"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_what_cannot_be_run_is_refused_by_name(key, value):
    with pytest.raises(ProblemsFound) as caught:
        ClipVisionConfig.from_transformers({key: value})
    (problem,) = caught.value.problems
    assert problem.name == f"image_encoder/config.json {key}"
    assert problem.value == value

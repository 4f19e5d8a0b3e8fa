"""Reading the config.json of a text encoder."""

import pytest
from transformers import UMT5Config

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.models.umt5 import Umt5Config


def test_the_defaults_are_umt5_xxl():
    xxl = {
        "model_type": "umt5",
        "vocab_size": 256384,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu",
        "_name_or_path": "anything",
        "torch_dtype": "bfloat16",
    }
    assert Umt5Config.from_transformers(xxl) == Umt5Config()


def test_missing_keys_have_the_defaults_of_transformers():
    theirs = UMT5Config().to_dict()
    assert Umt5Config.from_transformers({}) == Umt5Config.from_transformers(theirs)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("d_model", 0),
        ("d_kv", "64"),
        ("num_layers", None),
        ("num_heads", 2.0),
        ("layer_norm_epsilon", 0.0),
        ("layer_norm_epsilon", "1e-6"),
        ("relative_attention_num_buckets", 30),
        ("feed_forward_proj", "relu"),
        ("model_type", "t5"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_what_cannot_be_run_is_refused_by_name(key, value):
    with pytest.raises(ProblemsFound) as caught:
        Umt5Config.from_transformers({key: value})
    (problem,) = caught.value.problems
    assert problem.name == f"text_encoder/config.json {key}"
    assert problem.value == value

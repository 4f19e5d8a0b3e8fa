"""The map of CLIP parameters against the names and shapes of the released tower."""

import json
import math
from pathlib import Path

import pytest
from flax import nnx

from maxdiffusion.models.clip import ClipVisionConfig, ClipVisionEncoder
from maxdiffusion.models.clip.checkpoint import clip_map

NAMES = Path(__file__).parents[2] / "goldens" / "names" / "clip-vit-h-14-vision.json"


@pytest.fixture(scope="module")
def released():
    return {name: tuple(shape) for name, shape in json.loads(NAMES.read_text()).items()}


def parameter_shapes(config):
    encoder = nnx.eval_shape(lambda: ClipVisionEncoder(config, rngs=nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(encoder, nnx.Param))
    return {".".join(map(str, path)): leaf.shape for path, leaf in flat}


def test_every_parameter_has_tensors_of_its_shape(released):
    config = ClipVisionConfig()
    table, shapes = clip_map(config), parameter_shapes(config)
    assert set(table.parameters) == set(shapes)
    found = {
        name: entry.source_shape(shapes[entry.parameter])
        for entry in table.entries
        for name in table.sources(entry)
    }
    assert found == {name: released[name] for name in found}


@pytest.mark.parametrize("prefix", ["", "vision_model."])
def test_every_released_tensor_is_read_or_known_to_be_unused(released, prefix):
    table = clip_map(ClipVisionConfig())
    read = {name for entry in table.entries for name in table.sources(entry)}
    unused = {name for name in released if table.ignores(prefix + name)}
    assert {table.canonical(prefix + name) for name in released} == read | unused
    assert not read & unused
    assert unused == {name for name in released if ".31." in name or "post_layernorm" in name}
    assert sum(math.prod(shape) for shape in released.values()) == 630_766_080


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("vision_model.embeddings.position_ids", True),
        ("embeddings.position_ids", True),
        ("visual_projection.weight", True),
        ("vision_model.encoder.layers.30.mlp.fc1.weight", False),
        ("encoder.layers.3.mlp.fc1.weight", False),
        ("text_model.encoder.layers.31.mlp.fc1.weight", False),
        ("encoder.layers.32.mlp.fc1.weight", False),
    ],
)
def test_only_what_is_not_needed_is_ignored(name, ignored):
    assert clip_map(ClipVisionConfig()).ignores(name) == ignored

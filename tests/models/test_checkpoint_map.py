"""Transforms move values without changing them, whole or in parts, and can be undone."""

from dataclasses import replace

import numpy as np
import pytest

from maxdiffusion.models.checkpoint_map import (
    CONV2D,
    CONV3D,
    LINEAR,
    CheckpointMap,
    DropUnitDims,
    Entry,
    Identity,
    RopeHalves,
    linear,
)

CASES = {
    "keep": (Identity(), (3, 4)),
    "linear": (LINEAR, (6, 4)),
    "conv2d": (CONV2D, (4, 3, 2, 5)),
    "conv3d": (CONV3D, (4, 3, 1, 2, 5)),
    "gain": (DropUnitDims((-1, 1, 1, 1)), (7, 1, 1, 1)),
    "gain_of_one_channel": (DropUnitDims((-1, 1, 1)), (1, 1, 1)),
    "modulation": (DropUnitDims((1, 6, -1)), (1, 6, 4)),
    "rope_vector": (RopeHalves(4), (12,)),
    "rope_linear": (RopeHalves(4, before=LINEAR), (12, 5)),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    transform, shape = request.param
    return transform, np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_inverse_gives_the_tensor_back(case):
    transform, tensor = case
    parameter = transform.apply(tensor)
    np.testing.assert_array_equal(transform.invert(parameter), tensor)
    assert sorted(parameter.ravel()) == sorted(tensor.ravel())


def test_dimensions_tell_the_shape_of_the_tensor(case):
    transform, tensor = case
    entry = Entry(parameter="p", source="s", transform=transform)
    assert entry.source_shape(transform.apply(tensor).shape) == tensor.shape


def test_a_part_of_the_tensor_gives_the_part_of_the_parameter(case):
    transform, tensor = case
    parameter = transform.apply(tensor)
    for dimension, size in enumerate(parameter.shape):
        unit = transform.unit if dimension == parameter.ndim - 1 else 1
        part = slice(size // unit // 2 * unit, size)
        index = tuple(
            part if of == dimension else slice(None) for of in transform.dimensions(parameter.ndim)
        )
        wanted = parameter[(slice(None),) * dimension + (part,)]
        np.testing.assert_array_equal(transform.apply(tensor[index]), wanted)


def test_rope_pairs_become_halves():
    heads = np.array(["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"])
    assert RopeHalves(4).apply(heads).tolist() == ["a0", "a2", "a1", "a3", "b0", "b2", "b1", "b3"]


def test_layers_have_a_name_each():
    kernel, bias = linear("blocks.up", "blocks.{layer}.ffn.net.0")
    assert kernel.stacked
    table = CheckpointMap(entries=(kernel, bias), layers=2)
    assert table.sources(kernel) == ("blocks.0.ffn.net.0.weight", "blocks.1.ffn.net.0.weight")
    assert table.sources(replace(bias, layers=1)) == ("blocks.0.ffn.net.0.bias",)
    assert kernel.source_shape((2, 16, 24)) == (24, 16)
    assert len(tuple(linear("a", "b", bias=False))) == 1


def test_names_other_spellings_and_ignored_ones():
    table = CheckpointMap(
        entries=(Entry(parameter="p", source="encoder.p"),),
        ignored=(r".*\.position_ids",),
        aliases=((r"vision_model\.(.*)", r"encoder.\1"),),
    )
    assert table.canonical("vision_model.p") == "encoder.p"
    assert table.canonical("my.vision_model.p") == "my.vision_model.p"
    assert table.ignores("x.position_ids")
    assert not table.ignores("x.position_ids.more")


@pytest.mark.parametrize("names", [("p", "p", "s", "t"), ("p", "q", "s", "s")])
def test_nothing_is_listed_twice(names):
    first, second, one, two = names
    with pytest.raises(AssertionError, match="listed twice"):
        CheckpointMap(
            entries=(Entry(parameter=first, source=one), Entry(parameter=second, source=two))
        )

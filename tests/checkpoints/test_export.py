"""Exports give back the checkpoint that was loaded, bit for bit."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize

from maxdiffusion.checkpoints.export import ExportOptions, export_component
from maxdiffusion.checkpoints.load import load_parameters
from maxdiffusion.errors import ProblemsFound
from tests.checkpoints.small_model import (
    FLOATS,
    TABLE,
    assert_holds,
    expected,
    mesh,
    save,
    source_of,
    tensors,
)

CONFIG = {"_class_name": "SmallModel", "num_layers": 3}


def stored_tensors(folder):
    """The type, shape and bytes of all tensors of a folder, read by the safetensors package."""
    return {
        name: (fields["dtype"], tuple(fields["shape"]), bytes(fields["data"]))
        for file in folder.glob("*.safetensors")
        for name, fields in deserialize(file.read_bytes())
    }


def as_stored(values):
    words = {np.dtype(dtype): word for word, dtype in FLOATS.items()}
    return {
        name: (words[value.dtype], value.shape, value.tobytes()) for name, value in values.items()
    }


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_round_trip_is_exact(tmp_path, dtype):
    values = tensors(dtype)
    # Float64 parameters need jax's x64 mode; float32 holds every other type exactly.
    if dtype is np.float64:
        values = {name: value.astype(np.float32).astype(dtype) for name, value in values.items()}
    state, _ = load_parameters(source_of(save(tmp_path / "in", values)))
    out = tmp_path / "out"
    options = ExportOptions(dtype=np.dtype(dtype))
    export_component(state, TABLE, out, config=CONFIG, options=options)
    assert stored_tensors(out) == as_stored(values)
    assert json.loads((out / "config.json").read_text()) == CONFIG


def test_sharded_parameters_and_numbered_files(tmp_path):
    values = tensors()
    source = source_of(save(tmp_path / "in", values))
    state, _ = load_parameters(source, mesh=mesh(fsdp=4, tensor=2))
    out = tmp_path / "out"
    options = ExportOptions(max_file_bytes=4000, stem="model")
    export_component(state, TABLE, out, config=CONFIG, options=options)
    assert stored_tensors(out) == as_stored(values)
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in values.values())
    again, _ = load_parameters(source_of(out))
    assert_holds(again, expected(values))


def test_without_a_type_parameters_keep_theirs(tmp_path):
    source = source_of(save(tmp_path / "in", tensors()), ml_dtypes.bfloat16)
    export_component(load_parameters(source)[0], TABLE, tmp_path / "out", config=CONFIG)
    assert {word for word, *_ in stored_tensors(tmp_path / "out").values()} == {"BF16"}


def test_existing_folders_are_left_alone(tmp_path):
    state, _ = load_parameters(source_of(save(tmp_path, tensors())))
    with pytest.raises(ProblemsFound, match="exists already"):
        export_component(state, TABLE, tmp_path, config=CONFIG)


def test_a_failed_export_leaves_nothing(tmp_path):
    state, _ = load_parameters(source_of(save(tmp_path / "in", tensors())))
    with pytest.raises(TypeError):
        export_component(state, TABLE, tmp_path / "out", config={"bad": object()})
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    "wrong", [{"dtype": np.dtype(np.int32)}, {"max_file_bytes": 0}], ids=["dtype", "size"]
)
def test_options_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ExportOptions(**wrong)

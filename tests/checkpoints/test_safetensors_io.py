"""Files that are cut short, damaged or absent are named, with what was expected and found."""

import json

import numpy as np
import pytest
from safetensors import safe_open

from maxdiffusion.checkpoints.safetensors_io import (
    FileReader,
    byte_runs,
    extents,
    open_weights,
    read_header,
    whole,
)
from maxdiffusion.errors import ProblemsFound
from tests.checkpoints.small_model import FLOATS, save, tensors

STEM = "diffusion_pytorch_model"


def written(file, header, data=b""):
    """A file with this header (an object or raw bytes) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def only_problem(file):
    with pytest.raises(ProblemsFound) as caught:
        read_header(file)
    (problem,) = caught.value.problems
    assert str(file) in str(problem)
    return str(problem)


def problems_of(folder):
    with pytest.raises(ProblemsFound) as caught:
        open_weights(folder)
    return caught.value.problems


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_headers_agree_with_the_package(tmp_path, dtype):
    values = tensors(dtype)
    stored = open_weights(save(tmp_path, values))
    with safe_open(stored.files[0], framework="np") as file, FileReader() as reader:
        assert set(stored.tensors) == set(file.keys())
        for name, tensor in stored.tensors.items():
            assert tensor.float_dtype == dtype
            found = reader.read(tensor, whole(tensor.shape))
            np.testing.assert_array_equal(found, values[name])


def test_boxes_are_read_without_their_surroundings(tmp_path):
    values = {"x": np.arange(5 * 4 * 6 * 3, dtype=np.float32).reshape(5, 4, 6, 3)}
    tensor = open_weights(save(tmp_path, values)).tensors["x"]
    rng = np.random.default_rng(0)
    for _ in range(100):
        bounds = [sorted(rng.choice(size + 1, 2, replace=False)) for size in tensor.shape]
        box = tuple((int(start), int(stop)) for start, stop in bounds)
        with FileReader() as reader:
            found = reader.read(tensor, box)
            assert reader.bytes_read == found.nbytes
        np.testing.assert_array_equal(found, values["x"][tuple(slice(*span) for span in box)])
        assert found.shape == extents(box)


def test_whole_rows_are_one_run(tmp_path):
    tensor = open_weights(save(tmp_path, {"x": np.zeros((8, 4), np.float32)})).tensors["x"]
    assert list(byte_runs(tensor, ((2, 6), (0, 4)))) == [(tensor.start + 32, 64)]
    assert len(list(byte_runs(tensor, ((2, 6), (0, 3))))) == 4


def test_truncated_data(tmp_path):
    (file,) = open_weights(save(tmp_path, tensors())).files
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    message = only_problem(file)
    assert f"is truncated: expected {len(content)} bytes, found {len(content) - 10}" in message
    file.write_bytes(content + b"more")
    assert f"too long: expected {len(content)} bytes" in only_problem(file)


@pytest.mark.parametrize("size", [0, 5])
def test_no_room_for_a_header(tmp_path, size):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\0" * size)
    assert f"expected at least 8 bytes, found {size}" in only_problem(file)


def test_header_beyond_the_file(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes((1000).to_bytes(8, "little") + b"{}")
    assert "expected at least 1008 bytes for its header, found 10" in only_problem(file)
    file.write_bytes(b"<!DOCTYPE html><html>an error page</html>")
    assert "claims a header of" in only_problem(file)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "its header is not JSON"),
        (b"\xff\xfe\xfd", "its header is not JSON"),
        ([], "not a JSON object"),
        ({"x": {"dtype": "F32", "shape": [2]}}, "tensor x lacks"),
        ({"x": 3}, "tensor x lacks"),
        ({"x": entry(shape=(3,))}, "needs 12 bytes, its offsets give 8"),
        ({"x": entry(offsets=(8, 16))}, "bytes"),
        ({"x": entry(), "y": entry()}, "the tensor before it ends"),
        ({"x": entry(shape=(-2,), offsets=(8, 0))}, "bytes"),
    ],
)
def test_damaged_headers(tmp_path, header, message):
    file = written(tmp_path / "model.safetensors", header, b"\0" * 8)
    assert message in only_problem(file)
    assert "is corrupt" in only_problem(file)


def test_metadata_and_unknown_types_are_left_aside(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "x": entry(),
        "y": entry(offsets=(8, 9), dtype="F4"),
    }
    found = read_header(written(tmp_path / "x.safetensors", header, b"\0" * 9))
    assert [tensor.name for tensor in found] == ["x", "y"]


def test_index_that_names_absent_files(tmp_path):
    folder = save(tmp_path, tensors(), shards=4)
    for number in (2, 3):
        (folder / f"{STEM}-{number:05d}-of-00004.safetensors").unlink()
    problems = problems_of(folder)
    assert len(problems) == 2
    assert all("index.json names it" in str(problem) for problem in problems)


def test_index_that_names_the_wrong_file(tmp_path):
    folder = save(tmp_path, tensors(), shards=2)
    index = folder / f"{STEM}.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = content["weight_map"]["gain"]
    index.write_text(json.dumps(content))
    problems = problems_of(folder)
    assert [problem.name for problem in problems] == ["tensor ghost"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_damaged_index(tmp_path, content):
    folder = save(tmp_path, tensors(), shards=2)
    (folder / f"{STEM}.safetensors.index.json").write_text(content)
    (problem,) = problems_of(folder)
    assert "must be JSON with a weight_map" in str(problem)


def test_shards_without_an_index_are_counted(tmp_path):
    folder = save(tmp_path, tensors(), shards=3, index=False)
    (folder / f"{STEM}-00002-of-00003.safetensors").unlink()
    (problem,) = problems_of(folder)
    assert "00002-of-00003" in str(problem)


def test_a_tensor_in_two_files(tmp_path):
    folder = save(tmp_path, tensors(), shards=2, index=False)
    save(tmp_path / "other", {"gain": np.zeros(5, np.float32)})
    (tmp_path / "other" / f"{STEM}.safetensors").rename(folder / "extra.safetensors")
    (problem,) = problems_of(folder)
    assert problem.name == "tensor gain"


def test_variants_do_not_disturb(tmp_path):
    folder = save(tmp_path, tensors())
    save(tmp_path / "half", tensors(np.float16))
    variant = folder / f"{STEM}.fp16.safetensors"
    (tmp_path / "half" / f"{STEM}.safetensors").rename(variant)
    stored = open_weights(folder)
    assert [file.name for file in stored.files] == [f"{STEM}.safetensors"]


def test_other_formats_are_named(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (problem,) = problems_of(tmp_path)
    assert "found only pytorch_model.bin" in str(problem)

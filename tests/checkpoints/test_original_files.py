"""Files outside a diffusers folder: found, translated, dequantised and refused by their content."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from maxdiffusion.checkpoints.load import LoadOptions, load_parameters
from maxdiffusion.checkpoints.original_files import (
    NameDialects,
    find_transformers,
    open_transformer,
)
from maxdiffusion.checkpoints.safetensors_io import FileReader, whole
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.models.wan.original import Piece
from tests.checkpoints.small_model import (
    SHAPES,
    assert_holds,
    expected,
    mesh,
    save,
    source_of,
    tensors,
)

FP8 = ml_dtypes.float8_e4m3fn
TWO = ("transformer", "transformer_2")


def to_original(name):
    """The other spelling of the small model: `layers` for `blocks`, `emb` for `embedding`."""
    if name not in SHAPES:
        return None
    return name.replace("blocks.", "layers.").replace("embedding.", "emb.")


def pieces(name, shape):
    other = name.replace("layers.", "blocks.").replace("emb.", "embedding.")
    return (Piece(name=other, shape=shape),) if other in SHAPES else ()


NAMES = NameDialects(pieces=pieces, to_original=to_original)


def original(values, prefix=""):
    return {prefix + to_original(name): value for name, value in values.items()}


def opened(path, values):
    save_file(values, path)
    return open_transformer(path, NAMES)


def loaded(path, values, sizes=None, **options):
    """The parameters of a file, through the strict loader."""
    base = source_of(save(path.parent / "base", tensors()))
    source = type(base)(stored=opened(path, values), table=base.table, abstract=base.abstract)
    where = None if sizes is None else mesh(**sizes)
    return load_parameters(source, mesh=where, options=LoadOptions(**options))


def problems_of(call, *arguments, **options):
    with pytest.raises(ProblemsFound) as caught:
        call(*arguments, **options)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "model.diffusion_model."])
def test_original_names_with_and_without_a_prefix(tmp_path, prefix):
    values = tensors()
    state, report = loaded(tmp_path / "any.safetensors", original(values, prefix))
    assert_holds(state, expected(values))
    assert report.bytes_read == report.bytes_needed


def test_diffusers_names_in_a_single_file(tmp_path):
    values = tensors()
    assert_holds(loaded(tmp_path / "original.safetensors", values)[0], expected(values))


def test_shards_of_a_folder(tmp_path):
    values = tensors()
    folder = save(tmp_path / "high_noise_model", original(values), shards=3)
    assert set(open_transformer(folder, NAMES).tensors) == set(values)


def test_other_parts_of_an_all_in_one_file_are_left_alone(tmp_path):
    stored = original(tensors(), "model.diffusion_model.")
    stored["vae.decoder.conv.weight"] = np.zeros(3, np.float32)
    stored["text_encoders.umt5.shared.weight"] = np.zeros(3, np.float32)
    assert set(opened(tmp_path / "a.safetensors", stored).tensors) == set(SHAPES)
    stored["other.weight"] = np.zeros(3, np.float32)
    assert "other.weight" in opened(tmp_path / "b.safetensors", stored).tensors


def scaled(values, scale_of, ending=".scale_weight", marker=True):
    """The tensors with 8-bit weights and their scales, and the weights that they stand for."""
    stored, meant = {}, {}
    for index, (name, value) in enumerate(sorted(values.items())):
        if not name.endswith("up.weight") and not name.endswith("q.weight"):
            stored[name] = meant[name] = value
            continue
        scale = np.asarray(scale_of(index, value), np.float32)
        quantised = (value / scale.reshape(-1, 1)).astype(FP8)
        stored[name] = quantised
        stored[name.removesuffix(".weight") + ending] = scale
        stored[name.removesuffix(".weight") + ".scale_input"] = np.ones((), np.float32)
        meant[name] = quantised.astype(np.float32) * scale.reshape(-1, 1)
    if marker:
        stored["scaled_fp8"] = np.zeros(2, FP8)
    return stored, meant


SCALES = {
    "number": lambda index, value: np.float32(0.01 * (index + 1)),
    "one element": lambda index, value: np.full(1, 0.3),
    "rows": lambda index, value: np.abs(value).max(1) / 448,
    "column": lambda index, value: np.abs(value).max(1, keepdims=True) / 448,
}


@pytest.mark.parametrize("ending", [".scale_weight", ".weight_scale"])
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_scaled_weights_are_dequantised_while_they_stream(tmp_path, scale, ending):
    stored, meant = scaled(tensors(), scale, ending)
    renamed = {}
    for name, value in stored.items():
        module, _, leaf = name.rpartition(".")
        theirs = to_original(f"{module}.weight") if leaf.startswith(("scale", "weight_s")) else None
        renamed[theirs.removesuffix("weight") + leaf if theirs else to_original(name) or name] = (
            value
        )
    state, _ = loaded(tmp_path / "fp8.safetensors", renamed, read_bytes=60, threads=3)
    assert_holds(state, expected(meant))


@pytest.mark.parametrize("sizes", [{"tensor": 8}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_scaled_weights_on_a_mesh(tmp_path, sizes):
    stored, meant = scaled(tensors(), SCALES["rows"])
    state, _ = loaded(tmp_path / "fp8.safetensors", stored, sizes=sizes)
    assert_holds(state, expected(meant))


def test_eight_bits_without_scales_are_plain_numbers(tmp_path):
    values = tensors(FP8)
    state, _ = loaded(tmp_path / "fp8.safetensors", original(values))
    assert_holds(state, expected(values))


def test_a_scaled_file_without_a_scale_is_refused(tmp_path):
    stored, _ = scaled(tensors(), SCALES["number"])
    del stored["blocks.1.up.scale_weight"], stored["blocks.2.q.scale_weight"]
    said = problems_of(opened, tmp_path / "fp8.safetensors", stored)
    assert len(said) == 2
    assert "fp8.safetensors: blocks.1.up.weight='F8_E4M3': has no scale_weight" in "\n".join(said)


@pytest.mark.parametrize(
    ("scale", "rule"),
    [
        (np.zeros((), np.float32), "must be finite and above 0"),
        (np.full((), np.nan, np.float32), "must be finite and above 0"),
        (np.ones((2, 2), np.float32), "one for each of the 24 rows"),
        (np.ones((), np.int32), "must be a float"),
    ],
)
def test_bad_scales_are_named(tmp_path, scale, rule):
    stored, _ = scaled(tensors(), SCALES["number"])
    stored["blocks.1.up.scale_weight"] = scale
    (said,) = problems_of(opened, tmp_path / "fp8.safetensors", stored)
    assert "blocks.1.up.scale_weight" in said
    assert rule in said


def test_a_scale_without_a_weight_is_left_over(tmp_path):
    stored = original(tensors())
    stored["layers.0.gone.scale_weight"] = np.ones((), np.float32)
    (said,) = problems_of(loaded, tmp_path / "a.safetensors", stored)
    assert "a.safetensors: layers.0.gone.scale_weight='unexpected'" in said


def test_all_differences_are_listed_in_the_spelling_of_the_file(tmp_path):
    stored = original(tensors(), "diffusion_model.")
    del stored["diffusion_model.layers.1.q.weight"]
    stored["diffusion_model.layers.0.extra"] = np.zeros(3, np.float32)
    stored["elsewhere"] = np.zeros(3, np.float32)
    stored["diffusion_model.emb.weight"] = np.zeros((9, 16), np.float32)
    said = "\n".join(problems_of(loaded, tmp_path / "a.safetensors", stored))
    for part in (
        "a.safetensors: diffusion_model.layers.1.q.weight='missing'",
        "layers.0.extra='unexpected'",
        "elsewhere='unexpected'",
        "diffusion_model.emb.weight='mis-shaped': must have shape [10, 16], found [9, 16]",
    ):
        assert part in said
    assert said.count("\n") == 3


def test_both_spellings_of_one_tensor_are_refused(tmp_path):
    stored = {**original(tensors()), "embedding.weight": np.zeros((10, 16), np.float32)}
    base = tmp_path / "a.safetensors"
    said = "\n".join(problems_of(loaded, base, stored))
    assert "embedding.weight" in said


def test_a_file_of_another_model_is_named(tmp_path):
    (said,) = problems_of(opened, tmp_path / "x.safetensors", {"a.b": np.zeros(2, np.float32)})
    assert "is not a WAN transformer" in said
    assert "a.b" in said


def test_files_of_other_formats_are_refused(tmp_path):
    file = tmp_path / "model.pth"
    file.write_bytes(b"x")
    (said,) = problems_of(open_transformer, file, NAMES)
    assert "is not a .safetensors file" in said


def test_a_folder_with_several_models_is_refused(tmp_path):
    for name in ("one", "two"):
        save_file(original(tensors()), tmp_path / f"{name}.safetensors")
    (said,) = problems_of(open_transformer, tmp_path, NAMES)
    assert "holds 2 models: one.safetensors, two.safetensors" in said


@pytest.fixture
def places(tmp_path):
    """Folders and files as releases have them."""
    for folder in ("wan/high_noise_model", "wan/low_noise_model", "one", "diffusers/transformer"):
        save(tmp_path / folder, original(tensors()))
    save_file(original(tensors()), tmp_path / "file.safetensors")
    return tmp_path


def found(places, first, second="", experts=TWO):
    texts = [str(places / text) if text else "" for text in (first, second)]
    paths = find_transformers(*texts, experts, base=places / "base")
    return {name: str(path.relative_to(places)) for name, path in paths.items()}


def test_one_transformer(places):
    for location, path in {
        "one": "one",
        "file.safetensors": "file.safetensors",
        "diffusers": "diffusers/transformer",
    }.items():
        assert found(places, location, experts=("transformer",)) == {"transformer": path}


def test_two_experts_in_one_folder_or_in_two_places(places):
    both = {"transformer": "wan/high_noise_model", "transformer_2": "wan/low_noise_model"}
    assert found(places, "wan") == both
    mixed = {"transformer": "file.safetensors", "transformer_2": "one"}
    assert found(places, "file.safetensors", "one") == mixed


def test_numbers_of_experts_that_do_not_fit(places):
    (said,) = problems_of(found, places, "one")
    assert "wan_transformer_pretrained_model_name_or_path=" in said
    assert "Name the other one in wan_transformer_2_pretrained_model_name_or_path" in said
    assert "base/transformer_2" in said
    (said,) = problems_of(found, places, "", "one")
    assert "base/transformer)" in said
    (said,) = problems_of(found, places, "wan", experts=("transformer",))
    assert "holds two experts, high_noise_model and low_noise_model" in said
    (said,) = problems_of(found, places, "one", "one", experts=("transformer",))
    assert "this model has one transformer" in said


def test_a_place_that_does_not_exist(places):
    (said,) = problems_of(found, places, "gone.safetensors", experts=("transformer",))
    assert "is not a .safetensors file, a folder or a place on the hub" in said


@pytest.mark.parametrize(
    ("location", "asked", "path"),
    [
        (
            "owner/model/file.safetensors",
            ["file.safetensors", "file.safetensors/*"],
            "file.safetensors",
        ),
        ("owner/model/one", ["one", "one/*"], "one"),
    ],
)
def test_places_on_the_hub(monkeypatch, places, location, asked, path):
    calls = {}

    def snapshot_download(repository, allow_patterns):
        calls[repository] = allow_patterns
        return str(places)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    paths = find_transformers(location, "", ("transformer",), base=places)
    assert paths == {"transformer": places / path}
    assert calls == {"owner/model": asked}
    (said,) = problems_of(
        find_transformers, "owner/model/no.safetensors", "", ("transformer",), base=places
    )
    assert "Name the file: owner/model/FILE.safetensors" in said


def test_scales_are_read_before_the_weights(tmp_path):
    stored, meant = scaled(tensors(), SCALES["rows"])
    weights = opened(tmp_path / "fp8.safetensors", stored)
    name = "blocks.0.up.weight"
    (patch,) = weights.patches[name]
    box = ((3, 9), (2, 5))
    with FileReader() as reader:
        tensor = weights.tensors[name]
        values = reader.read(tensor, box).astype(np.float32)
        np.testing.assert_array_equal(patch.apply(values, box, reader), meant[name][3:9, 2:5])
        assert reader.read(tensor, whole(tensor.shape)).shape == (24, 16)


def test_an_index_of_the_original_layout(tmp_path):
    folder = save(tmp_path / "low_noise_model", original(tensors()), shards=2)
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["layers.9.q.weight"] = (
        "diffusion_pytorch_model-00003-of-00003.safetensors"
    )
    index.write_text(json.dumps(content))
    (said,) = problems_of(open_transformer, folder, NAMES)
    assert "00003-of-00003.safetensors" in said

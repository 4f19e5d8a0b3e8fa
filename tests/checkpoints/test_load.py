"""Loads are strict, equal on every mesh, and read each needed byte once."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxdiffusion.checkpoints.device_buffers import DeviceBuffer, HostBuffer, copy_values
from maxdiffusion.checkpoints.load import LoadOptions, load_components, load_parameters
from maxdiffusion.errors import ProblemsFound
from tests.checkpoints.small_model import (
    FLOATS,
    SHAPES,
    TABLE,
    assert_holds,
    expected,
    flat,
    mesh,
    save,
    source_of,
    tensors,
)


@pytest.mark.parametrize(("shards", "index"), [(1, False), (3, True), (3, False)])
def test_one_file_and_shards_give_the_same(tmp_path, shards, index):
    values = tensors()
    source = source_of(save(tmp_path / "transformer", values, shards, index))
    state, report = load_parameters(source)
    assert_holds(state, expected(values))
    size = sum(value.nbytes for value in values.values())
    assert report.bytes_read == report.bytes_needed == size
    assert report.gigabytes_per_second > 0


@pytest.mark.parametrize("stored", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("wanted", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_every_float_type_is_cast(tmp_path, stored, wanted):
    values = tensors(stored)
    state, _ = load_parameters(source_of(save(tmp_path, values), jnp.dtype(wanted)))
    assert_holds(state, expected(values, wanted))


@pytest.mark.parametrize("buffer", [HostBuffer, DeviceBuffer])
@pytest.mark.parametrize("read_bytes", [1, 1000, 1 << 20])
def test_small_reads_change_nothing(tmp_path, buffer, read_bytes):
    values = tensors()
    options = LoadOptions(buffer=buffer, read_bytes=read_bytes, threads=3)
    state, report = load_parameters(source_of(save(tmp_path, values)), options=options)
    assert_holds(state, expected(values))
    assert report.bytes_read == report.bytes_needed


@pytest.mark.parametrize("buffer", [HostBuffer, DeviceBuffer])
@pytest.mark.parametrize(
    "sizes",
    [{"data": 8}, {"tensor": 8}, {"fsdp": 4, "tensor": 2}, {"fsdp": 2, "ring": 2, "ulysses": 2}],
    ids=str,
)
def test_meshes_hold_the_same_values(tmp_path, sizes, buffer):
    values = tensors()
    source = source_of(save(tmp_path, values))
    options = LoadOptions(buffer=buffer)
    state, report = load_parameters(source, mesh=mesh(**sizes), options=options)
    assert_holds(state, expected(values))
    assert report.bytes_read == sum(value.nbytes for value in values.values())


def test_parameters_are_split_by_their_words(tmp_path):
    source = source_of(save(tmp_path, tensors()))
    found = flat(load_parameters(source, mesh=mesh(data=2, fsdp=2, tensor=2))[0])
    shards = {name: array.sharding.shard_shape(array.shape) for name, array in found.items()}
    assert shards["blocks.up.kernel"] == (3, 8, 12)
    assert shards["blocks.q.bias"] == (3, 16)
    assert shards["embedding"] == (10, 8)
    assert shards["gain"] == (5,)


def test_heads_may_be_cut_in_the_middle(tmp_path, monkeypatch):
    # Eight heads over eight devices are whole; a head width of 8 puts half a head on each.
    monkeypatch.setattr("tests.checkpoints.small_model.HEAD_DIM", 8)
    monkeypatch.setattr("tests.checkpoints.small_model.HEADS", 4)
    entries = [
        type(entry)(
            parameter=entry.parameter,
            source=entry.source,
            transform=type(entry.transform)(8, before=entry.transform.before),
        )
        if entry.parameter.startswith("blocks.q")
        else entry
        for entry in TABLE.entries
    ]
    table = type(TABLE)(entries=tuple(entries), layers=TABLE.layers)
    values = tensors()
    source = source_of(save(tmp_path, values), table=table)
    state, report = load_parameters(source, mesh=mesh(tensor=8))
    assert_holds(state, expected(values))
    assert report.bytes_read == report.bytes_needed


def test_a_donated_parameter_leaves_the_other_copies_alone(tmp_path):
    # On CPU all copies of a replicated parameter share the memory that they were read into.
    values = tensors()
    gain = flat(load_parameters(source_of(save(tmp_path, values)), mesh=mesh(data=8))[0])["gain"]
    copies = [shard.data for shard in gain.addressable_shards]
    jax.jit(lambda x: x + 1, donate_argnums=0)(copies[0])
    for copy in copies[1:]:
        np.testing.assert_array_equal(copy, values["gain"][:, 0, 0])


def test_without_a_mesh_one_device_holds_everything(tmp_path):
    state, _ = load_parameters(source_of(save(tmp_path, tensors())))
    assert {array.devices().pop() for array in flat(state).values()} == {jax.devices()[0]}


def test_everything_wrong_is_listed_at_once(tmp_path):
    values = tensors()
    del values["blocks.1.q.weight"], values["gain"]
    values["blocks.0.up.weight"] = values["blocks.0.up.weight"].T.copy()
    values["blocks.3.up.bias"] = np.zeros(24, np.float32)
    values["embedding.weight"] = np.zeros((10, 16), np.int32)
    source = source_of(save(tmp_path / "transformer", values))
    with pytest.raises(ProblemsFound) as caught:
        load_parameters(source)
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    for pattern in (
        r"transformer: blocks.1.q.weight='missing': .*\[32, 16\]",
        r"gain='missing': .*\[5, 1, 1\]",
        r"blocks.0.up.weight='mis-shaped': .*\[24, 16\], found \[16, 24\]",
        r"blocks.3.up.bias='unexpected': .*\[24\]",
        r"embedding.weight='I32': must be one of F64, F32",
    ):
        assert re.search(pattern, text), (pattern, text)


def test_problems_of_all_components_come_together(tmp_path):
    first, second = tensors(), tensors()
    del first["gain"], second["conv.weight"]
    sources = {
        name: source_of(save(tmp_path / name, values))
        for name, values in {"transformer": first, "transformer_2": second}.items()
    }
    with pytest.raises(ProblemsFound, match=r"(?s)transformer: gain.*transformer_2: conv.weight"):
        load_components(sources)


def test_ignored_names_and_other_spellings(tmp_path):
    values = tensors()
    stored = {**values, "text.position_ids": np.arange(4)}
    stored["model.embedding.weight"] = stored.pop("embedding.weight")
    state, _ = load_parameters(source_of(save(tmp_path, stored)))
    assert_holds(state, expected(values))


def test_of_two_spellings_the_own_one_wins(tmp_path):
    values = tensors()
    stored = {**values, "model.embedding.weight": values["embedding.weight"] + 1}
    state, _ = load_parameters(source_of(save(tmp_path, stored)))
    assert_holds(state, expected(values))


def test_components_load_side_by_side_with_progress(tmp_path):
    both = {name: tensors(seed=seed) for seed, name in enumerate(("transformer", "transformer_2"))}
    sources = {name: source_of(save(tmp_path / name, values)) for name, values in both.items()}
    seen = []
    states, report = load_components(sources, progress=lambda *bytes: seen.append(bytes))
    for name, values in both.items():
        assert_holds(states[name], expected(values))
    assert seen[-1] == (report.bytes_read, report.bytes_read)
    assert seen == sorted(seen)


def test_a_file_that_shrinks_during_the_load_is_named(tmp_path):
    source = source_of(save(tmp_path, tensors()))
    (file,) = source.stored.files
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ProblemsFound, match=r"safetensors'.*became shorter during the load"):
        load_parameters(source)


def test_stacked_shapes_of_the_table_are_known():
    for entry in TABLE.entries:
        for name in TABLE.sources(entry):
            assert name in SHAPES


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (700, 65), (2, 600, 33)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64])
def test_tiles_copy_a_transposed_matrix(shape, dtype):
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    target = np.zeros((*shape[:-2], shape[-1], shape[-2]), dtype)
    copy_values(target, values.swapaxes(-1, -2))
    np.testing.assert_array_equal(target, values.swapaxes(-1, -2).astype(dtype))


@pytest.mark.parametrize("field", ["threads", "read_bytes"])
def test_options_are_checked(field):
    with pytest.raises(ValueError, match=f"{field}=0"):
        LoadOptions(**{field: 0})

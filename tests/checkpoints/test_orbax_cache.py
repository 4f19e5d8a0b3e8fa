"""The cache of converted weights is used only when nothing that it depends on has changed."""

import json
import os
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxdiffusion.checkpoints.orbax_cache import Manifest, load_through_cache
from maxdiffusion.errors import ProblemsFound
from tests.checkpoints.small_model import (
    TABLE,
    assert_holds,
    expected,
    flat,
    mesh,
    save,
    source_of,
    tensors,
)

STEM = "diffusion_pytorch_model"


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "model" / "transformer", tensors(), shards=2)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def load(folder, cache, dtype=jnp.float32, table=TABLE, **options):
    """The state, the bytes read from the source, and the message."""
    sources = {"transformer": source_of(folder, dtype, table)}
    result = load_through_cache(sources, cache, **options)
    (message,) = result.messages
    return result.states["transformer"], result.report.bytes_read, message


def test_first_kept_then_taken(folder, cache):
    state, read, message = load(folder, cache)
    assert read > 0
    assert message == f"transformer: cached in {cache / 'transformer'}"
    again, read, message = load(folder, cache)
    assert read == 0
    assert message == f"transformer: taken from {cache / 'transformer'}"
    for loaded in (state, again):
        assert_holds(loaded, expected(tensors()))


def test_taken_in_another_layout(folder, cache):
    load(folder, cache, jnp.bfloat16)
    state, read, _ = load(folder, cache, jnp.bfloat16, mesh=mesh(fsdp=4, tensor=2))
    assert read == 0
    assert_holds(state, expected(tensors(), ml_dtypes.bfloat16))
    kernel = flat(state)["blocks.up.kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (3, 4, 12)


def test_changed_content_of_the_same_size(folder, cache):
    load(folder, cache)
    other = tensors(seed=1)
    save(folder, other, shards=2)
    state, read, message = load(folder, cache)
    assert read > 0
    assert "was converted again, because content of" in message
    assert f"{STEM}-00001-of-00002.safetensors" in message
    assert_holds(state, expected(other))
    assert load(folder, cache)[1] == 0


def test_touched_files_are_hashed_once_and_fit(folder, cache, monkeypatch):
    load(folder, cache)
    for file in folder.glob("*.safetensors"):
        os.utime(file, ns=(1, 1))
    assert load(folder, cache)[1] == 0

    def fail(path):
        raise AssertionError(f"{path} was hashed again")

    monkeypatch.setattr("maxdiffusion.runtime.files.digest_file", fail)
    assert load(folder, cache)[1] == 0


def test_other_dtype(folder, cache):
    load(folder, cache)
    state, read, message = load(folder, cache, jnp.bfloat16)
    assert read > 0
    assert "because parameters was" in message
    assert_holds(state, expected(tensors(), ml_dtypes.bfloat16))


def test_other_files_map_and_version(folder, cache, monkeypatch):
    load(folder, cache)
    table = type(TABLE)(entries=TABLE.entries, layers=TABLE.layers, ignored=("x",))
    assert "weight map was" in load(folder, cache, table=table)[2]
    monkeypatch.setattr("maxdiffusion.checkpoints.orbax_cache.__version__", "99")
    assert "package version was" in load(folder, cache, table=table)[2]
    for file in folder.glob(f"{STEM}*"):
        file.unlink()
    save(folder, tensors())
    assert f"content of {STEM}.safetensors was null" in load(folder, cache, table=table)[2]


def test_half_written_folders_are_never_used(folder, cache, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(folder, cache)
    assert [path.name for path in cache.iterdir()] == [".lock"]
    # A killed process cannot tidy up; the next writer does.
    dead = cache / ".unfinished-transformer-dead"
    dead.mkdir()
    assert "cached in" in load(folder, cache)[2]
    assert not dead.exists()


@pytest.mark.parametrize("content", [None, "", "{}", '{"files": 3}'])
def test_a_damaged_manifest(folder, cache, content):
    load(folder, cache)
    manifest = cache / "transformer" / "manifest.json"
    manifest.unlink() if content is None else manifest.write_text(content)
    _, read, message = load(folder, cache)
    assert read > 0
    assert "no readable manifest" in message


def test_damaged_arrays(folder, cache):
    load(folder, cache)
    shutil.rmtree(cache / "transformer" / "parameters")
    state, read, message = load(folder, cache)
    assert read > 0
    assert "could not be read" in message
    assert_holds(state, expected(tensors()))


def test_the_manifest_names_files_sizes_and_hashes(folder, cache):
    load(folder, cache)
    content = json.loads((cache / "transformer" / "manifest.json").read_text())
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
    assert {file["name"]: file["bytes"] for file in content["files"]} == sizes
    assert all(len(file["sha256"]) == 64 for file in content["files"])
    assert content["key"]["parameters"]["blocks.up.kernel"] == "float32[3, 16, 24]"


def test_wrong_weights_are_told_before_the_cache_is_asked(folder, cache):
    load(folder, cache)
    values = tensors()
    values["extra"] = np.zeros(1, np.float32)
    save(folder, values, shards=2)
    with pytest.raises(ProblemsFound, match="extra='unexpected'"):
        load(folder, cache)


def test_a_cache_that_cannot_be_a_folder(folder, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ProblemsFound, match="pretrained_orbax_dir"):
        load(folder, file / "cache")

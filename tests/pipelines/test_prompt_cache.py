"""Prompt embeddings in files: the same bits again, and nothing made with something else."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from maxdiffusion.checkpoints.diffusers_folder import open_model_folder
from maxdiffusion.pipelines import prompt_cache as prompt_cache
from maxdiffusion.pipelines.prompt_cache import (
    LostRows,
    PromptCache,
    UnusableRows,
    encoder_digest,
    read_rows,
    write_rows,
)
from maxdiffusion.runtime import files as runtime_content
from maxdiffusion.runtime.files import CacheKey, as_path
from tests.pipelines.tiny_text import CHECKPOINT, PROMPTS

KEY = CacheKey({"text_encoder": "abc", "tokens": [3, 1]})
LENGTH = 512


def folder_at(path, **made_with):
    return PromptCache(
        folder=path,
        made_with={"text_encoder": "abc", "dtype": "float32"} | made_with,
        width=64,
    )


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_rows_come_back_bit_for_bit(tmp_path, dtype):
    rows = np.array([[0.1, -0.0, 3e38], [1e-40, -2.5, np.nan]], np.float32).astype(dtype)
    write_rows(tmp_path / "new" / "file", KEY, rows)
    found = read_rows(tmp_path / "new" / "file", KEY)
    assert (found.dtype, found.tobytes()) == (rows.dtype, rows.tobytes())


def damaged(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "bit":
        content[-1] ^= 1
    elif how == "cut":
        del content[-4:]
    elif how == "empty":
        content = bytearray()
    elif how == "header":
        content[20] = 0
    elif how == "text":
        content = bytearray(b"not a file of ours, at all")
    path.write_bytes(content)
    if how == "foreign":
        save_file({"rows": np.zeros((2, 64), np.float32)}, path)


@pytest.mark.parametrize("how", ["bit", "cut", "empty", "header", "text", "foreign"])
def test_a_damaged_file_is_named_and_encoded_again(tmp_path, how, caplog):
    folder = folder_at(tmp_path)
    folder.write((3, 1), LENGTH, np.ones((2, 64), np.float32))
    path = folder.path((3, 1), LENGTH)
    damaged(path, how)
    kept = folder.scan([(3, 1)], LENGTH)
    assert kept.missing == ((3, 1),)
    assert len(caplog.messages) == 1
    assert f"{path.name} is NOT used but encoded again" in caplog.messages[0]
    kept.store((3, 1), LENGTH, jnp.ones((1, LENGTH, 64)))
    assert not folder.scan([(3, 1)], LENGTH).missing


@pytest.mark.parametrize(
    "other", [{"text_encoder": "abd"}, {"dtype": "bfloat16"}, {"matmul": "highest"}]
)
def test_rows_made_with_something_else_are_not_found(tmp_path, other, caplog):
    folder_at(tmp_path).write((3, 1), LENGTH, np.ones((2, 64), np.float32))
    changed = folder_at(tmp_path, **other)
    assert changed.scan([(3, 1)], LENGTH).missing
    assert not caplog.messages  # another file belongs there, and is not there yet
    shutil.copy(folder_at(tmp_path).path((3, 1), LENGTH), changed.path((3, 1), LENGTH))
    with pytest.raises(UnusableRows, match="another prompt, length, dtype or text encoder"):
        changed.read((3, 1), LENGTH)


def test_other_tokens_and_lengths_are_other_texts(tmp_path):
    folder = folder_at(tmp_path)
    folder.write((3, 1), LENGTH, np.ones((2, 64), np.float32))
    kept = folder.scan([(3, 1), (3, 2, 1), (3, 1)], LENGTH)
    assert (list(kept.found), kept.missing) == ([(3, 1)], ((3, 2, 1),))
    assert kept.unneeded_components == ()
    assert "1 of 2 are in" in kept.describe()
    assert not kept.has((3, 1), 256)
    assert folder.scan([(3, 1)], 256).missing


def test_what_was_encoded_once_needs_no_encoder(tmp_path, shared_text, encoder, tokenizer):
    expected = encoder.encode(PROMPTS[:3])
    ids = [tokenizer.ids(prompt) for prompt in PROMPTS[:3]]
    folder = folder_at(tmp_path)
    filling = shared_text.encoder(kept=folder.scan(ids, LENGTH))
    np.testing.assert_array_equal(filling.encode(PROMPTS[:3]), expected)
    kept = folder.scan(ids, LENGTH)
    assert kept.unneeded_components == ("text_encoder",)
    assert "the text encoder is not loaded" in kept.describe()
    reading = shared_text.encoder(kept=kept, weights=None)
    reading.compile(PROMPTS[:3])
    np.testing.assert_array_equal(reading.encode(PROMPTS[:3]), expected)
    with pytest.raises(ValueError, match="text encoder was not loaded"):
        reading.encode(["something else"])


def test_only_what_is_missing_is_encoded(tmp_path, text, tokenizer):
    first, second = (tokenizer.ids(prompt) for prompt in PROMPTS[:2])
    folder = folder_at(tmp_path)
    text.encoder(kept=folder.scan([first], LENGTH)).encode(PROMPTS[:1])
    assert text.encoded == [first]
    text.encoder(kept=folder.scan([first, second], LENGTH)).encode(PROMPTS[:2])
    assert text.encoded == [first, second]


def test_files_that_vanish_during_a_run_are_named(tmp_path):
    folder = folder_at(tmp_path)
    folder.write((3, 1), LENGTH, np.ones((2, 64), np.float32))
    kept = folder.scan([(3, 1)], LENGTH)
    folder.write((3, 1), LENGTH, np.zeros((2, 64), np.float32))
    with pytest.raises(LostRows, match="its rows have changed"):
        kept.read((3, 1), LENGTH)
    folder.path((3, 1), LENGTH).unlink()
    with pytest.raises(LostRows, match=r"there is no such file.*start the same command again"):
        kept.read((3, 1), LENGTH)


def test_processes_that_see_different_files_use_none(tmp_path, monkeypatch, caplog):
    folder = folder_at(tmp_path)
    folder.write((3, 1), LENGTH, np.ones((2, 64), np.float32))
    monkeypatch.setattr(prompt_cache, "all_gather_str", lambda topic, text: (text, "others"))
    kept = folder.scan([(3, 1)], LENGTH)
    assert kept.missing == ((3, 1),)
    assert "NOT used: the processes see different files" in caplog.messages[0]


def test_a_full_disk_does_not_end_a_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    folder = replace(folder_at(tmp_path), folder=tmp_path / "file" / "below")
    folder.write((3, 1), LENGTH, np.ones((2, 64), np.float32))
    assert "could NOT be written" in caplog.messages[0]


def test_an_encoder_is_known_by_what_it_contains(tmp_path, monkeypatch):
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    cache = as_path(str(tmp_path / "cache"))
    weights = tmp_path / "model" / "text_encoder" / "model.safetensors"

    def found():
        return encoder_digest(open_model_folder(tmp_path / "model"), cache)

    first = found()
    with monkeypatch.context() as patch:  # the second time no file is read
        patch.setattr(runtime_content, "digest_file", lambda path: pytest.fail(f"{path} was read"))
        assert found() == first
    weights.touch()
    assert found() == first
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    changed = found()
    assert changed != first
    tokenizer = tmp_path / "model" / "tokenizer" / "tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"version": "1.1"}))
    assert found() not in (first, changed)

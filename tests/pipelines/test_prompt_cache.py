"""Prompt embeddings in files: the same bits again, and nothing made with something else."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from pipelines.test_prompts import CHECKPOINT, PROMPTS, make_encoder
from safetensors.numpy import save_file

from maxdiffusion.commands.kept_prompts import encoder_digest
from maxdiffusion.pipelines import kept_prompts
from maxdiffusion.pipelines.kept_prompts import LostRows, PromptFolder
from maxdiffusion.pipelines.prompt_files import UnusableRows, read_rows, write_rows
from maxdiffusion.pipelines.prompts import PromptEncoder, PromptTokenizer
from maxdiffusion.runtime.places import place
from maxdiffusion.weights import manifest
from maxdiffusion.weights.folder import open_model_folder

KEY = {"text_encoder": "abc", "tokens": [3, 1]}
LENGTH = 512


@pytest.fixture(scope="module")
def tokenizer():
    return PromptTokenizer.load(CHECKPOINT / "tokenizer")


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return make_encoder(tokenizer)[0]


def folder_at(path, said=None, **made_with):
    return PromptFolder(
        folder=path,
        made_with={"text_encoder": "abc", "dtype": "float32"} | made_with,
        width=64,
        say=[].append if said is None else said.append,
    )


def with_kept(encoder, kept, weights):
    return PromptEncoder(
        tokenizer=encoder._tokenizer, programs=encoder._programs, weights=weights, kept=kept
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
def test_a_damaged_file_is_named_and_made_anew(tmp_path, how):
    said = []
    folder = folder_at(tmp_path, said)
    folder.write((3, 1), LENGTH, np.ones((2, 64), np.float32))
    path = folder.path((3, 1), LENGTH)
    damaged(path, how)
    kept = folder.look([(3, 1)], LENGTH)
    assert kept.missing == ((3, 1),)
    assert len(said) == 1
    assert f"{path.name} is NOT used but made anew" in said[0]
    kept.keep((3, 1), LENGTH, jnp.ones((1, LENGTH, 64)))
    assert not folder.look([(3, 1)], LENGTH).missing


@pytest.mark.parametrize(
    "other", [{"text_encoder": "abd"}, {"dtype": "bfloat16"}, {"matmul": "highest"}]
)
def test_rows_made_with_something_else_are_not_found(tmp_path, other):
    folder_at(tmp_path).write((3, 1), LENGTH, np.ones((2, 64), np.float32))
    said = []
    changed = folder_at(tmp_path, said, **other)
    assert changed.look([(3, 1)], LENGTH).missing
    assert not said  # another file belongs there, and is not there yet
    shutil.copy(folder_at(tmp_path).path((3, 1), LENGTH), changed.path((3, 1), LENGTH))
    with pytest.raises(UnusableRows, match="another prompt, length, dtype or text encoder"):
        changed.read((3, 1), LENGTH)


def test_other_tokens_and_lengths_are_other_texts(tmp_path):
    folder = folder_at(tmp_path)
    folder.write((3, 1), LENGTH, np.ones((2, 64), np.float32))
    kept = folder.look([(3, 1), (3, 2, 1), (3, 1)], LENGTH)
    assert (list(kept.there), kept.missing) == ([(3, 1)], ((3, 2, 1),))
    assert kept.needless == ()
    assert "1 of 2 are in" in kept.describe()
    assert not kept.has((3, 1), 256)
    assert folder.look([(3, 1)], 256).missing


def test_what_was_encoded_once_needs_no_encoder(tmp_path, encoder, tokenizer):
    expected = encoder.encode(PROMPTS[:3])
    ids = [tokenizer.ids(prompt) for prompt in PROMPTS[:3]]
    folder = folder_at(tmp_path)
    filling = with_kept(encoder, folder.look(ids, LENGTH), encoder._weights)
    np.testing.assert_array_equal(filling.encode(PROMPTS[:3]), expected)
    kept = folder.look(ids, LENGTH)
    assert kept.needless == ("text_encoder",)
    assert "the text encoder is not loaded" in kept.describe()
    reading = with_kept(encoder, kept, None)
    reading.compile(PROMPTS[:3])
    np.testing.assert_array_equal(reading.encode(PROMPTS[:3]), expected)
    with pytest.raises(ValueError, match="text encoder was not loaded"):
        reading.encode(["something else"])


def test_only_what_is_missing_is_encoded(tmp_path, encoder, tokenizer, monkeypatch):
    first, second = (tokenizer.ids(prompt) for prompt in PROMPTS[:2])
    folder = folder_at(tmp_path)
    with_kept(encoder, folder.look([first], LENGTH), encoder._weights).encode(PROMPTS[:1])
    again = with_kept(encoder, folder.look([first, second], LENGTH), encoder._weights)
    encoded, encode_ids = [], again._encode_ids
    monkeypatch.setattr(
        again, "_encode_ids", lambda ids, rows: encoded.append(ids) or encode_ids(ids, rows)
    )
    again.encode(PROMPTS[:2])
    assert encoded == [second]


def test_files_that_vanish_during_a_run_are_named(tmp_path):
    folder = folder_at(tmp_path)
    folder.write((3, 1), LENGTH, np.ones((2, 64), np.float32))
    kept = folder.look([(3, 1)], LENGTH)
    folder.write((3, 1), LENGTH, np.zeros((2, 64), np.float32))
    with pytest.raises(LostRows, match="its rows are others"):
        kept.read((3, 1), LENGTH)
    folder.path((3, 1), LENGTH).unlink()
    with pytest.raises(LostRows, match=r"there is no such file.*start the same command again"):
        kept.read((3, 1), LENGTH)


def test_processes_that_see_different_files_use_none(tmp_path, monkeypatch):
    said = []
    folder = folder_at(tmp_path, said)
    folder.write((3, 1), LENGTH, np.ones((2, 64), np.float32))
    monkeypatch.setattr(kept_prompts, "exchange", lambda topic, text: (text, "others"))
    kept = folder.look([(3, 1)], LENGTH)
    assert kept.missing == ((3, 1),)
    assert "NOT used: the processes see different files" in said[0]


def test_a_full_disk_does_not_end_a_run(tmp_path):
    said = []
    (tmp_path / "file").write_text("")
    folder = replace(folder_at(tmp_path, said), folder=tmp_path / "file" / "below")
    folder.write((3, 1), LENGTH, np.ones((2, 64), np.float32))
    assert "could NOT be written" in said[0]


def test_an_encoder_is_known_by_what_it_contains(tmp_path, monkeypatch):
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    cache = place(str(tmp_path / "cache"))
    weights = tmp_path / "model" / "text_encoder" / "model.safetensors"

    def found():
        return encoder_digest(open_model_folder(tmp_path / "model"), cache)

    first = found()
    with monkeypatch.context() as patch:  # the second time no file is read
        patch.setattr(manifest, "_sha256", lambda path: pytest.fail(f"{path} was read"))
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

"""Digests of files and values, and keys of caches."""

import os

import pytest

from maxdiffusion.runtime import files as content
from maxdiffusion.runtime.files import CacheKey, digest_files, digest_value


def test_a_digest_follows_the_content(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    (first,) = digest_files([file])
    file.write_bytes(b"two")
    (second,) = digest_files([file])
    assert first.name == second.name == "weights"
    assert first.sha256 != second.sha256


def test_a_file_with_known_size_and_time_is_not_read_again(tmp_path, monkeypatch):
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    known = digest_files([file])
    monkeypatch.setattr(content, "digest_file", lambda path: pytest.fail("read"))
    assert digest_files([file], known) == known


def test_another_modification_time_reads_the_file_again(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    known = digest_files([file])
    file.write_bytes(b"two")
    os.utime(file, ns=(0, known[0].mtime_ns + 1))
    assert digest_files([file], known)[0].sha256 != known[0].sha256


def test_values_and_keys_do_not_depend_on_the_order_of_facts():
    assert digest_value({"a": 1, "b": 2}) == digest_value({"b": 2, "a": 1})
    assert CacheKey({"a": 1, "b": 2}).digest == CacheKey({"b": 2, "a": 1}).digest
    assert CacheKey({"a": 1}).digest != CacheKey({"a": 2}).digest


def test_a_key_names_what_changed():
    key = CacheKey({"jax": "0.9", "mesh": {"ring": 2}, "long": "x" * 100})
    assert key.differences({"jax": "0.9", "mesh": {"ring": 2}, "long": "x" * 100}) == []
    changed = key.differences({"jax": "0.8", "gone": 1, "mesh": {"ring": 2}, "long": "y" * 100})
    assert 'jax was "0.8", now "0.9"' in changed
    assert "gone was 1, now null" in changed
    assert any(phrase.startswith("long was sha256 ") for phrase in changed)

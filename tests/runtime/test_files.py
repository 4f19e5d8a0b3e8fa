"""Paths on a disk and in object storage, which here is a folder behind the same library."""

import json

import numpy as np
import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.pipelines.aot_cache import read_executable, write_executable
from maxdiffusion.runtime.files import (
    CacheKey,
    add_new_json_lines,
    append_json_lines,
    as_path,
    check_object_store,
    copy_file,
    copy_folder,
    is_object_store,
    local_copy,
    new_folder,
    read_json_lines,
    replacing,
)
from maxdiffusion.runtime.video import is_video_of, write_video
from maxdiffusion.training.data.latent_cache import MANIFEST, CachedClips, save_shard, shard_file
from tests import object_storage


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """The folder that gs://bucket is."""
    monkeypatch.setenv(object_storage.ROOT, str(tmp_path / "buckets"))
    object_storage.use_buckets()
    return tmp_path / "buckets" / "bucket"


def test_a_disk_is_told_from_a_bucket(tmp_path):
    assert not is_object_store(tmp_path)
    assert is_object_store("gs://bucket/videos")
    assert as_path(str(tmp_path / "a")) == tmp_path / "a"
    assert str(as_path("gs://bucket/videos") / "a.mp4") == "gs://bucket/videos/a.mp4"


@pytest.mark.usefixtures("bucket")
def test_a_file_appears_in_a_bucket_when_it_is_whole():
    target = as_path("gs://bucket/deep/a.txt")

    def fail():
        with replacing(target) as unfinished:
            unfinished.write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert not target.exists()
    with replacing(target) as unfinished:
        unfinished.write_text("whole")
        assert not target.exists()
    assert target.read_text() == "whole"


@pytest.mark.usefixtures("bucket")
def test_a_copy_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(read, written, length):
        written.write(read.read(2))
        raise OSError("the link is gone")

    (tmp_path / "a.txt").write_text("whole")
    target = as_path("gs://bucket/a.txt")
    monkeypatch.setattr("shutil.copyfileobj", fail)
    with pytest.raises(OSError, match="the link is gone"):
        copy_file(tmp_path / "a.txt", target)
    assert not target.exists()


@pytest.mark.usefixtures("bucket")
def test_a_video_in_a_bucket_is_known_again():
    target = as_path("gs://bucket/videos/a.mp4")
    assert not is_video_of(target, "maxdiffusion-0123")
    frames = np.random.default_rng(0).integers(0, 255, (3, 16, 16, 3), np.uint8)
    write_video(target, frames, fps=8, identity="maxdiffusion-0123")
    assert is_video_of(target, "maxdiffusion-0123")
    assert not is_video_of(target, "maxdiffusion-4567")


@pytest.mark.usefixtures("bucket")
def test_lines_are_added_in_a_bucket():
    file = as_path("gs://bucket/notes.jsonl")
    append_json_lines(file, [{"a": 1}])
    add_new_json_lines(file, [{"a": 1}, {"a": 2}])
    assert read_json_lines(file) == [{"a": 1}, {"a": 2}]


@pytest.mark.usefixtures("bucket")
def test_compiled_programs_are_kept_in_a_bucket():
    file = as_path("gs://bucket/programs") / "step.executable"
    write_executable(file, CacheKey({"jax": "1"}), b"code")
    assert [found.name for found in file.parent.glob("step*.executable")] == ["step.executable"]
    assert read_executable(file, CacheKey({"jax": "1"})) == b"code"


@pytest.mark.usefixtures("bucket")
def test_latents_are_kept_in_a_bucket():
    folder = as_path("gs://bucket/latents")
    latents = np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2)
    tensors = {"latents": latents, "ids": np.ones((2, 4), np.int32), "lengths": np.array([4, 3])}
    save_shard(shard_file(folder, 0), tensors)
    (folder / MANIFEST).write_text("{}")
    clips = CachedClips(folder)
    assert len(clips) == 2
    np.testing.assert_array_equal(clips[1]["latents"], latents[1])


def test_a_folder_goes_to_a_bucket_when_it_is_whole(bucket):
    def write(*, fails):
        with new_folder(as_path("gs://bucket/model")) as unfinished:
            (unfinished / "vae").mkdir()
            (unfinished / "vae" / "config.json").write_text(json.dumps({"a": 1}))
            assert not fails, "stop"

    with pytest.raises(AssertionError, match="stop"):
        write(fails=True)
    assert not (bucket / "model").exists()
    write(fails=False)
    assert json.loads((bucket / "model" / "vae" / "config.json").read_text()) == {"a": 1}


@pytest.mark.usefixtures("bucket")
def test_what_reads_disks_only_gets_a_copy(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    assert local_copy(folder / "a.txt") == folder / "a.txt"
    copy_folder(folder, as_path("gs://bucket/copied"))
    copy = local_copy(as_path("gs://bucket/copied/a.txt"))
    assert not is_object_store(copy)
    assert (copy.suffix, copy.read_text()) == (".txt", "text")


@pytest.mark.usefixtures("bucket")
def test_storage_that_does_not_answer_is_a_problem_with_a_way_out():
    check_object_store("output_dir", "gs://bucket/videos")
    with pytest.raises(ProblemsFound, match="must be a path on a disk or begin with one of gs://"):
        check_object_store("output_dir", "ftp://host/videos")
    with pytest.raises(ProblemsFound, match="pip install adlfs"):
        check_object_store("output_dir", "az://container/videos")

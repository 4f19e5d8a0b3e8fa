"""Paths on a disk and in object storage, which here is a dictionary behind the same library."""

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from maxdiffusion.runtime.atomic import replacing
from maxdiffusion.runtime.places import is_remote, place, remote_problem
from maxdiffusion.runtime.video import is_video_of, write_video


class Bucket(MemoryFileSystem):
    """Answers to gs:// in place of gcsfs."""

    protocol = ("gs", "gcs")
    store = {}  # noqa: RUF012 - fsspec's own form
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        path = str(path).removeprefix("gs://").removeprefix("gcs://")
        return "/" + path.strip("/") if path.strip("/") else ""


@pytest.fixture
def bucket():
    fsspec.register_implementation("gcs", Bucket, clobber=True)
    Bucket.store.clear()


def test_a_disk_is_told_from_a_bucket(tmp_path):
    assert not is_remote(tmp_path)
    assert is_remote("gs://bucket/videos")
    assert place(str(tmp_path / "a")) == tmp_path / "a"
    assert str(place("gs://bucket/videos") / "a.mp4") == "gs://bucket/videos/a.mp4"


@pytest.mark.usefixtures("bucket")
def test_a_file_appears_in_a_bucket_when_it_is_whole():
    target = place("gs://bucket/deep/a.txt")

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
def test_a_video_in_a_bucket_is_known_again():
    target = place("gs://bucket/videos/a.mp4")
    assert not is_video_of(target, "maxdiffusion-0123")
    frames = np.random.default_rng(0).integers(0, 255, (3, 16, 16, 3), np.uint8)
    write_video(target, frames, fps=8, identity="maxdiffusion-0123")
    assert is_video_of(target, "maxdiffusion-0123")
    assert not is_video_of(target, "maxdiffusion-4567")


@pytest.mark.usefixtures("bucket")
def test_storage_that_does_not_answer_is_a_problem_with_a_way_out():
    assert remote_problem("output_dir", "gs://bucket/videos") is None
    unknown = remote_problem("output_dir", "ftp://host/videos")
    assert "must be a path on a disk or begin with one of gs://" in str(unknown)
    missing = remote_problem("output_dir", "az://container/videos")
    assert "pip install adlfs" in str(missing)

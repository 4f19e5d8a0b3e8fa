"""Videos are fetched and written behind the run: how far behind, and what becomes of errors."""

import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.generation.resume import AHEAD, Provenance, Video, VideoWriter
from maxdiffusion.runtime.video import VideoError

SOON = 30  # seconds that nothing here takes
PLAIN = Provenance(made_with={"fps": 16}, embed_metadata=False, resumable=False)


class Disk:
    """Takes videos once it is released, in place of the encoder."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.written: list[tuple[int, np.ndarray]] = []
        self.bad: set[int] = set()

    def write(self, provenance: Provenance, video: Video, frames: np.ndarray) -> None:
        """Takes the place of `write_file`."""
        assert self.released.wait(SOON)
        if video.seed in self.bad:
            raise VideoError(f"{video.path}: the disk is full")
        self.written.append((video.seed, frames))

    @property
    def names(self) -> list[int]:
        return [seed for seed, _ in self.written]


@pytest.fixture
def disk() -> Disk:
    return Disk()


def add(writer: VideoWriter, seed: int) -> None:
    video = Video(prompt="", seed=seed, path=Path(f"{seed}.mp4"))
    writer.add(video, jnp.full((2, 4, 4, 3), seed, jnp.uint8))


def test_the_run_goes_on_while_videos_are_written(disk: Disk) -> None:
    with VideoWriter(PLAIN, disk.write) as writer:
        for seed in range(AHEAD):
            add(writer, seed)
        writer.check()
        writer.fetch()
        assert not disk.written  # and yet all of the above returned
        disk.released.set()
    assert disk.names == list(range(AHEAD))
    for seed, frames in disk.written:
        assert isinstance(frames, np.ndarray)
        np.testing.assert_array_equal(frames, np.full((2, 4, 4, 3), seed, np.uint8))


def test_no_more_than_a_few_videos_wait(disk: Disk) -> None:
    with VideoWriter(PLAIN, disk.write) as writer:
        for seed in range(AHEAD):
            add(writer, seed)
        late = threading.Thread(target=add, args=(writer, AHEAD))
        late.start()
        late.join(0.3)
        assert late.is_alive()
        disk.released.set()
        late.join(SOON)
        assert not late.is_alive()
    assert disk.names == list(range(AHEAD + 1))


def test_what_could_not_be_written_is_said_at_the_next_step(disk: Disk) -> None:
    disk.bad = {0}
    disk.released.set()
    writer = VideoWriter(PLAIN, disk.write)
    add(writer, 0)
    writer._waiting[0].written.exception(SOON)
    with pytest.raises(VideoError, match="disk is full"):
        writer.check()
    with pytest.raises(VideoError, match="disk is full"):
        add(writer, 1)


def test_what_could_not_be_written_is_said_at_the_end(disk: Disk) -> None:
    disk.bad = {1}

    def run() -> None:
        with VideoWriter(PLAIN, disk.write) as writer:
            add(writer, 0)
            disk.released.set()
            add(writer, 1)

    with pytest.raises(VideoError, match=r"1\.mp4"):
        run()
    assert disk.names == [0]


def test_an_error_of_the_run_leaves_the_videos_before_it(disk: Disk) -> None:
    def fail() -> None:
        with VideoWriter(PLAIN, disk.write) as writer:
            for seed in range(AHEAD):
                add(writer, seed)
            threading.Timer(0.2, disk.released.set).start()
            raise RuntimeError("of the run")

    with pytest.raises(RuntimeError, match="of the run"):
        fail()
    assert disk.names == list(range(AHEAD))

"""Videos on their way from the devices to files, while the next ones are made.

frames on the devices --fetching--> bytes on the host --writing--> file
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import jax
import numpy as np

from maxdiffusion.commands.videos import Video, identity, metadata
from maxdiffusion.config.config import Config
from maxdiffusion.runtime.timing import Stage, Timings
from maxdiffusion.runtime.video import write_video

AHEAD = 1  # videos that wait for their files, besides the one that is made


@dataclass(frozen=True, kw_only=True)
class _OnItsWay:
    """A video that was handed over: when its frames are on the host, and when its file is there."""

    fetched: Future[np.ndarray]
    written: Future[None]


class VideoWriter:
    """Fetches and writes one video after the other, in threads of its own, on the first process.

    What goes wrong there is raised by the next call, and at the latest at the end of the block.
    After an error elsewhere the videos that were handed over are still written.
    """

    def __init__(self, config: Config):
        self._config = config
        self._fetching = ThreadPoolExecutor(1, thread_name_prefix="fetching frames")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="writing videos")
        self._waiting: deque[_OnItsWay] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.finish()
            else:
                wait([video.written for video in self._waiting])
        finally:
            self._fetching.shutdown(wait=False, cancel_futures=True)
            self._writing.shutdown(wait=False, cancel_futures=True)

    def add(self, video: Video, frames: jax.Array) -> None:
        """Hands a video over; waits while too many others have no file yet."""
        if jax.process_index() != 0:
            return
        self.check()
        while len(self._waiting) >= AHEAD:
            self._waiting[0].written.result()
            self._waiting.popleft()
        fetched = self._fetching.submit(np.asarray, frames)
        written = self._writing.submit(lambda: write(self._config, video, fetched.result()))
        self._waiting.append(_OnItsWay(fetched=fetched, written=written))

    def check(self) -> None:
        """Raises what went wrong so far; returns at once."""
        while self._waiting and self._waiting[0].written.done():
            self._waiting[0].written.result()
            self._waiting.popleft()

    def fetch(self) -> None:
        """Returns when all frames are on the host."""
        for video in self._waiting:
            video.fetched.result()

    def finish(self) -> None:
        """Returns when all files are there."""
        while self._waiting:
            self._waiting[0].written.result()
            self._waiting.popleft()


def write(config: Config, video: Video, frames: np.ndarray) -> None:
    """Writes a video; it is kept from then on, whatever happens to those after it."""
    write_video(
        video.path,
        frames,
        fps=config.fps,
        metadata=metadata(config, video),
        identity=identity(config, video),
    )
    print(f"wrote {video.path}", flush=True)


@contextmanager
def decoding(timings: Timings, part: Stage) -> Iterator[None]:
    """Times a part of decoding.

    Of the host's part that is what the run waits for: the rest happens while it goes on.
    """
    stage = timings.stage
    with stage(Stage.INFERENCE), stage(Stage.VAE_DECODE), stage(part):
        yield

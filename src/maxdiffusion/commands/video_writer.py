"""Videos on their way from the devices to files, while the next ones are made.

latents on the host ----moving----> file, until the video's own is there
frames on the devices --moving----> bytes on the host --writing--> file
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import jax
import numpy as np

from maxdiffusion.commands.kept_latents import LatentsOfGroup, forget_latents, keep_latents
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
        self._moving = ThreadPoolExecutor(1, thread_name_prefix="moving latents and frames")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="writing videos")
        self._waiting: deque[_OnItsWay] = deque()
        self._kept: Future[None] | None = None

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
            self._moving.shutdown(wait=False, cancel_futures=True)
            self._writing.shutdown(wait=False, cancel_futures=True)

    def keep(self, videos: Sequence[Video], latents: LatentsOfGroup) -> None:
        """Keeps latents until their videos have files, in a job that could read them again."""
        if jax.process_index() == 0 and self._config.prompts_file:
            self._kept = self._moving.submit(keep_latents, self._config, videos, latents)

    def settle(self) -> None:
        """Returns when latents are kept, so that nothing denoised before can be lost."""
        if self._kept is not None:
            self._kept.result()

    def add(self, video: Video, frames: jax.Array) -> None:
        """Hands a video over; waits while too many others have no file yet."""
        if jax.process_index() != 0:
            return
        self.check()
        while len(self._waiting) >= AHEAD:
            self._waiting[0].written.result()
            self._waiting.popleft()
        fetched = self._moving.submit(np.asarray, frames)
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
    if config.prompts_file:
        forget_latents(video)


@contextmanager
def decoding(timings: Timings, part: Stage) -> Iterator[None]:
    """Times a part of decoding.

    Of the host's part that is what the run waits for: the rest happens while it goes on.
    """
    stage = timings.stage
    with stage(Stage.INFERENCE), stage(Stage.VAE_DECODE), stage(part):
        yield

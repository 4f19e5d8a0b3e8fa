"""generate_wan where gs:// is a folder of this machine: python in_buckets.py CONFIG.yml ..."""

import os
import signal
import sys
from typing import Any

from maxdiffusion.generate_wan import main
from maxdiffusion.generation import resume as video_writer
from maxdiffusion.generation.resume import Video
from tests.object_storage import use_buckets

DIES_BEFORE = "TEST_DIES_BEFORE"  # the variable that names a video which is not to be written


def die_before(name: str) -> None:
    """Makes this process end, as by kill -9, when it is to write a video."""
    write = video_writer.write

    def write_or_die(config: Any, video: Video, frames: Any) -> None:
        if video.path.name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        write(config, video, frames)

    video_writer.write = write_or_die


if __name__ == "__main__":
    use_buckets()
    die_before(os.environ.get(DIES_BEFORE, ""))
    sys.exit(main(sys.argv[1:]))

"""generate_wan where gs:// is a folder of this machine: python in_buckets.py CONFIG.yml ..."""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from maxdiffusion.cli.commands import GENERATE
from maxdiffusion.cli.distributed_run import run_distributed
from maxdiffusion.cli.entry import with_config
from maxdiffusion.config import ParsedConfig
from maxdiffusion.generation.generate import generate
from maxdiffusion.generation.resume import Provenance, Video, write_file
from tests.object_storage import use_buckets

DIES_BEFORE = "TEST_DIES_BEFORE"  # the variable that names a video which is not to be written


def write_or_die(provenance: Provenance, video: Video, frames: np.ndarray) -> None:
    """Writes a video, or ends this process, as by kill -9, before the one of the variable."""
    if video.path.name == os.environ.get(DIES_BEFORE):
        os.kill(os.getpid(), signal.SIGKILL)
    write_file(provenance, video, frames)


def make_videos(parsed: ParsedConfig, arguments: Sequence[str]) -> None:
    """Does the work of the command with another writer."""
    run_distributed(parsed, partial(generate, write=write_or_die))


if __name__ == "__main__":
    use_buckets()
    command = replace(GENERATE, run=with_config(make_videos))
    sys.exit(command.main(sys.argv[1:]))

"""Room on a disk: asked for before long work, and said in one line when it runs out meanwhile."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from maxdiffusion.runtime.problems import Problem, RunFailed

GIGABYTE = 1000**3


class WritingFailed(RunFailed):
    """Files could not be written; says which, where, and what to do."""


def room_problems(name: str, folder: Path, needed: int) -> Iterator[Problem]:
    """A problem if fewer than `needed` bytes are free where `folder` is, or will be.

    Object storage (`gs://...`) has no end.
    """
    if "://" in os.fspath(folder):
        return
    free = shutil.disk_usage(_nearest(folder)).free
    if needed > free:
        yield Problem(
            name=name,
            value=str(folder),
            rule=f"needs {needed / GIGABYTE:.3g} GB of disk, and {free / GIGABYTE:.3g} GB are free",
            remedy="Make room there, or name a folder on another disk",
        )


@contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Turns an error of the disk in its block into one line that tells a person what to do.

    The block itself leaves nothing half-written behind.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WritingFailed(
            f"{what} could not be written to {folder} ({error}). Make room there, or name another "
            "folder, and start the same command again: what is whole is kept."
        ) from error


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    folder = folder.expanduser().absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())

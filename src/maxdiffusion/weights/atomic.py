"""Folders that appear whole or not at all."""

import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from maxdiffusion.runtime.coordination import barrier, from_first
from maxdiffusion.runtime.places import copy_folder, is_remote, place

UNFINISHED = ".unfinished-"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """An unfinished folder beside `folder` that takes its place when the block ends well.

    What was at `folder` before is removed only after the new one is complete. What goes to object
    storage is written on the disk first, and sent file by file when it is complete.
    """
    if is_remote(folder):
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)
            copy_folder(Path(scratch), folder)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.parent / f"{UNFINISHED}{folder.name}-{uuid.uuid4().hex[:8]}"
    unfinished.mkdir()
    try:
        yield unfinished
        _flush(unfinished)
        _swap(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def new_shared_folder(folder: Path) -> Iterator[Path]:
    """As `new_folder`, for all processes of a job to write into; the first makes and renames it.

    In object storage nothing can be renamed: there the folder is emptied and written in its place,
    and what marks it as complete must be written last.
    """
    with ExitStack() as stack:

        def begin() -> str:
            if is_remote(folder):
                if folder.exists():
                    cast(Any, folder).rmtree()
                return os.fspath(folder)
            stack.enter_context(only_writer(folder.parent))
            return os.fspath(stack.enter_context(new_folder(folder)))

        yield place(from_first("a new folder", begin))
        barrier("a new folder is written")
    barrier("a new folder is in place")


@contextmanager
def only_writer(parent: Path) -> Iterator[None]:
    """Waits until no other process writes folders in `parent`, and clears what dead ones left."""
    with (parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in parent.glob(f"{UNFINISHED}*"):
            shutil.rmtree(left)
        yield


def _swap(unfinished: Path, folder: Path) -> None:
    """Puts the new folder in the place of the old one."""
    if not folder.exists():
        unfinished.rename(folder)
        return
    old = unfinished.with_name(f"{unfinished.name}-old")
    folder.rename(old)
    unfinished.rename(folder)
    shutil.rmtree(old)


def _flush(folder: Path) -> None:
    """Brings the content to the disk, so that a crash after the rename does not leave holes."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

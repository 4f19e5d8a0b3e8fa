"""Files that are either whole or not there."""

import contextlib
import os
import re
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from maxdiffusion.runtime.places import copy_file, is_remote

_unfinished: set[Path] = set()
_lock = threading.Lock()
_UNFINISHED_NAME = re.compile(r"\.(?P<stem>.+)\.[0-9a-f]{12}(?P<suffix>\.[^.]*|)")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path` and with its suffix, that becomes `path` at the end.

    The folder is made if needed. After a failure nothing is left behind, and an older file at
    `path` is as it was. What goes to object storage is written on the disk first: there a file
    appears when all of it was sent.
    """
    if is_remote(path):
        with tempfile.TemporaryDirectory() as scratch:
            local = Path(scratch) / path.name
            yield local
            path.parent.mkdir(parents=True, exist_ok=True)
            copy_file(local, path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:12]}{path.suffix}")
    with _lock:
        _unfinished.add(unfinished)
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
        with _lock:
            _unfinished.discard(unfinished)


def abandon() -> None:
    """Removes what is being written now, for a process that ends without unwinding."""
    with _lock:
        for path in _unfinished:
            path.unlink(missing_ok=True)


def remove_leftovers(paths: Sequence[Path]) -> None:
    """Removes what processes that were killed left of their attempts to write `paths`."""
    places = {path.parent for path in paths if not is_remote(path) and path.parent.is_dir()}
    wanted = {(path.stem, path.suffix) for path in paths}
    for file in (file for folder in places for file in folder.iterdir()):
        found = _UNFINISHED_NAME.fullmatch(file.name)
        if found is not None and (found["stem"], found["suffix"]) in wanted:
            file.unlink(missing_ok=True)

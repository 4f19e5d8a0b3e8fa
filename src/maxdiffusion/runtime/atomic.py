"""Files that are either whole or not there."""

import contextlib
import os
import re
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

_unfinished: set[Path] = set()
_lock = threading.Lock()
_TOKEN = "[0-9a-f]{12}"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path` and with its suffix, that becomes `path` at the end.

    The folder is made if needed. After a failure nothing is left behind, and an older file at
    `path` is as it was.
    """
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


def remove_leftovers(path: Path) -> None:
    """Removes what processes that were killed left of their attempts to write `path`."""
    pattern = re.compile(rf"\.{re.escape(path.stem)}\.{_TOKEN}{re.escape(path.suffix)}")
    if path.parent.is_dir():
        for file in path.parent.iterdir():
            if pattern.fullmatch(file.name):
                file.unlink(missing_ok=True)

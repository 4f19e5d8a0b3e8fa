"""Folders and files on a disk or in object storage, through the library that orbax uses for both.

gs://, s3://, az:// and hf:// need their own library (gcsfs, s3fs, ...), which is not installed with
this package; all else is a path on a disk.
"""

import atexit
import functools
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import cast

from etils import epath

from maxdiffusion.runtime.problems import Problem

LIBRARIES = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs", "hf": "huggingface_hub"}


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is in object storage."""
    return "://" in os.fspath(path)


def place(text: str) -> Path:
    """A path that can be read and written, wherever it is; a disk's is absolute."""
    if is_remote(text):
        return cast(Path, epath.Path(text))  # has the methods of Path, and is none
    return Path(text).expanduser().absolute()


def local_copy(path: Path) -> Path:
    """The file itself on a disk; of one in object storage a copy, for what reads disks only.

    Copies are removed when the process ends.
    """
    if not is_remote(path):
        return path
    copy = _scratch() / f"{uuid.uuid4().hex}{path.suffix}"
    copy_file(path, copy)
    return copy


def copy_file(source: Path, target: Path) -> None:
    """Copies the content of a file; either may be in object storage.

    The copies of the libraries stay within one storage. In object storage a file appears when it is
    closed, and an error closes it too: what came of it is removed.
    """
    try:
        with source.open("rb") as read, target.open("wb") as written:
            shutil.copyfileobj(read, written, 1 << 24)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def copy_folder(source: Path, target: Path) -> None:
    """Copies all files below `source` to `target`, which is made if need be."""
    target.mkdir(parents=True, exist_ok=True)
    for item in source.iterdir():
        if item.is_dir():
            copy_folder(item, target / item.name)
        else:
            copy_file(item, target / item.name)


def move_folder(source: Path, target: Path) -> None:
    """Gives a folder another name; in object storage, where only files have names, by copies."""
    if is_remote(source):
        copy_folder(source, target)
        cast(epath.Path, source).rmtree()
    else:
        source.rename(target)


@functools.cache
def _scratch() -> Path:
    folder = tempfile.mkdtemp(prefix="maxdiffusion_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def remote_problem(name: str, text: str) -> Problem | None:
    """Why object storage cannot be used; None if it answers."""
    scheme = text.split("://", 1)[0]
    if scheme not in LIBRARIES:
        known = ", ".join(f"{known}://" for known in LIBRARIES)
        rule = f"must be a path on a disk or begin with one of {known}"
        return Problem(name=name, value=text, rule=rule, remedy="Use one of these")
    try:
        epath.Path(text).exists()
    except Exception as error:  # each library has errors of its own
        rule = f"does not answer ({type(error).__name__}: {str(error).splitlines()[0][:160]})"
        remedy = f"pip install {LIBRARIES[scheme]}, and log in; or write to a disk"
        return Problem(name=name, value=text, rule=rule, remedy=remedy)
    return None

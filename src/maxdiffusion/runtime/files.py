"""Files and folders, on a disk or in object storage: atomic writes, disk space, content identity.

    paths            as_path, is_object_store, check_object_store, local_copy, copy_*, move_folder
    atomic writes    replacing (a file), new_folder, only_writer
    disk space       check_free_space before long work, writing around the work itself
    JSON lines       read_json_lines, append_json_lines, add_new_json_lines
    identity         digests of files and values, CacheKey

Object storage goes through etils, as in orbax. gs://, s3://, az:// and hf:// each need a library
(gcsfs, s3fs, ...) that is not installed with this package. Every cache of this package uses an
entry only if its stored `CacheKey` equals the current one. Files enter a key by the SHA-256 of
their content, never by name or time alone.
"""

import atexit
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from etils import epath
from safetensors import SafetensorError

from maxdiffusion.errors import Problem, ProblemsFound, RunFailed

LIBRARIES = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs", "hf": "huggingface_hub"}
GIGABYTE = 1000**3
COPY_BYTES = 1 << 24  # read at once

# On a disk or in object storage; epath's class has the methods of `Path`, but is no subclass.
FilePath = Path | epath.Path


# Paths


def is_object_store(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is in object storage."""
    return "://" in os.fspath(path)


def as_path(text: str) -> FilePath:
    """Returns a path to read or write, in object storage or absolute on a disk."""
    if is_object_store(text):
        return epath.Path(text)
    return Path(text).expanduser().absolute()


def check_object_store(name: str, text: str) -> None:
    """Raises ProblemsFound if the object storage that the field `name` gives does not answer."""
    scheme = text.split("://", 1)[0]
    if scheme not in LIBRARIES:
        known = ", ".join(f"{known}://" for known in LIBRARIES)
        rule = f"must be a path on a disk or begin with one of {known}"
        raise ProblemsFound([Problem(name=name, value=text, rule=rule)])
    try:
        epath.Path(text).exists()
    except Exception as error:  # each library has its own exceptions
        rule = f"does not answer ({type(error).__name__}: {str(error).splitlines()[0][:160]})"
        remedy = f"pip install {LIBRARIES[scheme]}, and log in; or write to a disk"
        raise ProblemsFound([Problem(name=name, value=text, rule=rule, remedy=remedy)]) from error


def open_binary(path: FilePath, mode: Literal["rb", "wb"] = "rb") -> BinaryIO:
    """Opens a file for bytes; epath's own annotation leaves open which kind of stream it is."""
    return cast(BinaryIO, path.open(mode))


def size_in_bytes(file: FilePath) -> int:
    """Returns the size of a file; the status of one in object storage has another form."""
    return file.stat().length if isinstance(file, epath.Path) else file.stat().st_size


def read_range(path: FilePath, start: int, count: int) -> bytes:
    """Returns `count` bytes of a file from `start`, fewer at its end; threads may call it at once.

    From object storage only these bytes are requested.
    """
    with open_binary(path) as stream:
        stream.seek(start)
        return stream.read(count)


def local_copy(path: FilePath) -> Path:
    """Returns a path on a disk with the file's content, for libraries that need one.

    Copies from object storage are removed when the process exits.
    """
    if isinstance(path, Path):
        return path
    copy = _scratch() / f"{uuid.uuid4().hex}{path.suffix}"
    copy_file(path, copy)
    return copy


@functools.cache
def _scratch() -> Path:
    folder = tempfile.mkdtemp(prefix="maxdiffusion_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def copy_file(source: FilePath, target: FilePath) -> None:
    """Copies a file between any two storages. Removes the target after an error.

    The storage libraries copy only within one storage. In object storage a file appears when it is
    closed, and an error closes it too.
    """
    try:
        with open_binary(source) as read, open_binary(target, "wb") as written:
            shutil.copyfileobj(read, written, COPY_BYTES)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def copy_folder(source: FilePath, target: FilePath) -> None:
    """Copies all files below `source` to `target`, which is created if needed."""
    target.mkdir(parents=True, exist_ok=True)
    for item in source.iterdir():
        if item.is_dir():
            copy_folder(item, target / item.name)
        else:
            copy_file(item, target / item.name)


def move_folder(source: FilePath, target: FilePath) -> None:
    """Renames a folder. Object storage cannot rename, so its files are copied and deleted."""
    if isinstance(source, epath.Path):
        copy_folder(source, target)
        source.rmtree()
    else:
        source.rename(target)


# Atomic files and folders

UNFINISHED_FOLDER = ".unfinished-"
_UNFINISHED_FILE = re.compile(r"\.(?P<stem>.+)\.[0-9a-f]{12}(?P<suffix>\.[^.]*|)")
# Files that this process is writing; `remove_unfinished` needs them when it exits from a thread.
_unfinished: set[Path] = set()
_lock = threading.Lock()


@contextmanager
def replacing(path: FilePath) -> Iterator[Path]:
    """Yields a temporary path in the same folder, which is renamed to `path` after the block.

    The folder is created if needed. After a failure the temporary file is removed and an older file
    at `path` is unchanged. For object storage the file is written to a disk and then uploaded: it
    appears there when the upload is complete.
    """
    if isinstance(path, epath.Path):
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


def remove_unfinished() -> None:
    """Removes the files that this process is writing, before it exits without unwinding."""
    with _lock:
        for path in _unfinished:
            path.unlink(missing_ok=True)


def remove_leftovers(paths: Sequence[FilePath]) -> None:
    """Removes temporary files of killed processes that were writing `paths`."""
    parents = {path.parent for path in paths if isinstance(path, Path)}
    folders = [parent for parent in parents if parent.is_dir()]
    wanted = {(path.stem, path.suffix) for path in paths}
    for file in (file for folder in folders for file in folder.iterdir()):
        found = _UNFINISHED_FILE.fullmatch(file.name)
        if found is not None and (found["stem"], found["suffix"]) in wanted:
            file.unlink(missing_ok=True)


@contextmanager
def new_folder(folder: FilePath) -> Iterator[Path]:
    """Yields a temporary folder in the same parent, which replaces `folder` after the block.

    The previous folder is removed only after the new one is complete. For object storage the folder
    is written to a disk and uploaded file by file.
    """
    if isinstance(folder, epath.Path):
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)
            copy_folder(Path(scratch), folder)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.parent / f"{UNFINISHED_FOLDER}{folder.name}-{uuid.uuid4().hex[:8]}"
    unfinished.mkdir()
    try:
        yield unfinished
        _flush(unfinished)
        _swap(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def only_writer(parent: Path) -> Iterator[None]:
    """Locks `parent` against other writers of folders, and removes what killed ones left there."""
    with (parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in parent.glob(f"{UNFINISHED_FOLDER}*"):
            shutil.rmtree(left)
        yield


def _swap(unfinished: Path, folder: Path) -> None:
    """Renames the new folder to `folder`, and then removes the old one."""
    if not folder.exists():
        unfinished.rename(folder)
        return
    old = unfinished.with_name(f"{unfinished.name}-old")
    folder.rename(old)
    unfinished.rename(folder)
    shutil.rmtree(old)


def _flush(folder: Path) -> None:
    """Syncs the content to the disk, so that a crash after the rename leaves no empty files."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# Room on a disk


class WritingFailed(RunFailed):
    """Files could not be written. The message names them, the folder and a way out."""


def check_free_space(name: str, folder: FilePath, needed: int) -> None:
    """Raises ProblemsFound if fewer than `needed` bytes are free where `folder` is or will be.

    Object storage has no limit.
    """
    if isinstance(folder, epath.Path):
        return
    free = shutil.disk_usage(_existing_parent(folder)).free
    if needed > free:
        problem = Problem(
            name=name,
            value=str(folder),
            rule=f"needs {needed / GIGABYTE:.3g} GB of disk, and {free / GIGABYTE:.3g} GB are free",
            remedy="Make room there, or name a folder on another disk",
        )
        raise ProblemsFound([problem])


def _existing_parent(folder: Path) -> Path:
    """Returns the folder, or its nearest parent that exists."""
    folder = folder.expanduser().absolute()
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


@contextmanager
def writing(what: str, folder: FilePath) -> Iterator[None]:
    """Turns a disk error in its block into `WritingFailed`, one line with a way out.

    The block must leave no partial files behind.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WritingFailed(
            f"{what} could not be written to {folder} ({error}). Make room there, or name another "
            "folder, and start the same command again: complete files are kept."
        ) from error


# JSON lines


def read_json_lines(file: FilePath) -> list[dict[str, Any]]:
    """Reads one object per line; none if the file is missing. Skips lines that were cut short.

    A process that is killed while it appends leaves such a line.
    """
    if not file.exists():
        return []
    found = []
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def append_json_lines(file: FilePath, lines: Iterable[Mapping[str, Any]]) -> None:
    """Appends one line per object, after the end of a line that was cut short.

    Object storage cannot append, so there the whole file is rewritten.
    """
    if isinstance(file, epath.Path):
        with replacing(file) as rewritten:
            texts = (f"{json.dumps(line)}\n" for line in [*read_json_lines(file), *lines])
            rewritten.write_text("".join(texts), encoding="utf-8")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.write(b"\n")
        stream.writelines(f"{json.dumps(line)}\n".encode() for line in lines)


def add_new_json_lines(file: FilePath, lines: Iterable[Mapping[str, Any]]) -> None:
    """Appends the objects that the file does not contain yet."""
    present = read_json_lines(file)
    new = [line for line in lines if line not in present]
    if new:
        append_json_lines(file, new)


READERS = 8
"""Files that are hashed at the same time."""
SHOWN_CHARACTERS = 60
"""Longest value that `CacheKey.differences` prints in full; others appear as digests."""


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """A file: its name, size, modification time and the SHA-256 of its content."""

    name: str
    bytes: int
    mtime_ns: int
    sha256: str


def digest_files(files: Sequence[Path], known: Iterable[FileDigest] = ()) -> tuple[FileDigest, ...]:
    """Returns the digests of files, in order.

    A file that has the name, size and modification time of a `known` one is not read again.
    """
    hashes = {(file.name, file.bytes, file.mtime_ns): file.sha256 for file in known}

    def hashed(path: Path) -> FileDigest:
        status = path.stat()
        name, size, mtime_ns = path.name, status.st_size, status.st_mtime_ns
        sha256 = hashes.get((name, size, mtime_ns)) or digest_file(path)
        return FileDigest(name=name, bytes=size, mtime_ns=mtime_ns, sha256=sha256)

    with ThreadPoolExecutor(min(READERS, len(files) or 1)) as pool:
        return tuple(pool.map(hashed, files))


def digest_file(path: Path) -> str:
    """Returns the SHA-256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_value(value: Any) -> str:
    """Returns the SHA-256 of a value's canonical JSON; what JSON lacks enters as `str`."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def canonical(value: Any) -> str:
    """Returns JSON that is the same text for the same value."""
    return json.dumps(value, sort_keys=True, default=str)


@dataclass(frozen=True)
class CacheKey:
    """Everything that a cached item depends on, as named facts that JSON can hold."""

    facts: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The key as canonical JSON, to be stored with the item."""
        return canonical(self.facts)

    @property
    def digest(self) -> str:
        """The SHA-256 of the key."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def file_stem(self) -> str:
        """A short name for the file of the item; the stored key decides whether it is used."""
        return self.digest[:24]

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """Returns one phrase for every fact that changed since `stored` was written."""
        facts = json.loads(self.text)
        names = [*facts, *(name for name in stored if name not in facts)]
        return [
            f"{name} was {_shown(stored.get(name))}, now {_shown(facts.get(name))}"
            for name in names
            if stored.get(name) != facts.get(name)
        ]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"

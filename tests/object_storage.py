"""Object storage on this machine: gs:// paths that end up in a folder.

Python's libraries reach it through fsspec (`Buckets`, in the place of gcsfs). TensorStore, which
writes the arrays of orbax, speaks to Google's service over HTTP; `served` answers in its place.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

ROOT = "TEST_BUCKETS"  # the variable that names the folder of all buckets


class Buckets(DirFileSystem):
    """Answers to gs:// in the place of gcsfs; like there, a folder is made by writing into it."""

    protocol = ("gs", "gcs")

    def __init__(self, **_: Any):
        super().__init__(path=os.environ[ROOT], fs=LocalFileSystem(auto_mkdir=True))

    @property
    def path(self) -> str:
        """The folder of all buckets: asked for each time, because instances are kept."""
        return os.environ[ROOT]

    @path.setter
    def path(self, _: str) -> None:
        """Nothing: the environment says it."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        text = os.fspath(path)
        for scheme in cls.protocol:
            text = text.removeprefix(f"{scheme}://")
        return text.strip("/")

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        """Nothing can be renamed."""
        raise AssertionError(f"{path1} is renamed")


def use_buckets() -> None:
    """Makes this process find gs:// in the folder that the environment names."""
    fsspec.register_implementation("gcs", Buckets, clobber=True)
    # gcsfs brings Google's own library, which orbax asks one thing: how a bucket names folders.
    plain = SimpleNamespace(hierarchical_namespace_enabled=False)
    client = SimpleNamespace(get_bucket=lambda name: plain)
    cloud = ModuleType("google.cloud")
    cloud.storage = SimpleNamespace(Client=lambda: client)  # type: ignore[attr-defined]
    sys.modules["google.cloud"] = cloud


@contextmanager
def served(root: Path) -> Iterator[dict[str, str]]:
    """Serves the buckets in a folder; gives the environment for processes that use them."""
    handler = type("Handler", (_Handler,), {"root": root})
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {
            ROOT: str(root),
            "TENSORSTORE_GCS_HTTP_URL": f"http://localhost:{server.server_address[1]}",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "nobody asks",
        }
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    """The few requests of Google's storage that TensorStore makes."""

    root: Path
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        bucket, name, query = self._asked()
        if not name:
            self._answer(HTTPStatus.OK, json.dumps({"items": self._listed(bucket, query)}).encode())
            return
        try:
            content = (self.root / bucket / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            self._answer(HTTPStatus.NOT_FOUND)
            return
        wanted = self.headers.get("Range", "")
        if not wanted:
            self._answer(HTTPStatus.OK, content)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1] if first else content[-int(last) :]
        start = int(first) if first else len(content) - len(part)
        span = f"bytes {start}-{start + len(part) - 1}/{len(content)}"
        self._answer(HTTPStatus.PARTIAL_CONTENT, part, {"Content-Range": span})

    def do_POST(self) -> None:
        bucket, _, query = self._asked()
        target = self.root / bucket / query["name"]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
        about = json.dumps(_about(target, query["name"])).encode()
        self._answer(HTTPStatus.OK, about)

    def do_DELETE(self) -> None:
        bucket, name, _ = self._asked()
        (self.root / bucket / name).unlink(missing_ok=True)
        self._answer(HTTPStatus.NO_CONTENT)

    def _asked(self) -> tuple[str, str, dict[str, str]]:
        """The bucket, the object and the options of a request."""
        asked = urlsplit(self.path)
        place = asked.path.split("/b/", 1)[1]
        bucket, _, name = place.partition("/o")
        query = {key: values[0] for key, values in parse_qs(asked.query).items()}
        return bucket, unquote(name.lstrip("/")), query

    def _listed(self, bucket: str, query: dict[str, str]) -> list[dict[str, str]]:
        files = [file for file in (self.root / bucket).rglob("*") if file.is_file()]
        named = {str(file.relative_to(self.root / bucket)): file for file in files}
        first, end = query.get("startOffset", ""), query.get("endOffset")
        return [
            _about(named[name], name)
            for name in sorted(named)
            if name.startswith(query.get("prefix", ""))
            and name >= first
            and (end is None or name < end)
        ]

    def _answer(
        self, status: HTTPStatus, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"x-goog-generation": "1", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


def _about(file: Path, name: str) -> dict[str, str]:
    status = file.stat()
    return {"name": name, "size": str(status.st_size), "generation": str(status.st_mtime_ns)}

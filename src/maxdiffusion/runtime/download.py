"""Downloads files of http(s) addresses that a person gave, within limits of bytes and time.

urllib alone: one request per input needs no library. This module is imported only when there is an
address. Redirects are followed a few times and to http(s) only, so that an address cannot lead to a
local file. The type that a server states is checked before the body is read.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage, HTTPResponse
from io import BufferedIOBase
from pathlib import Path
from typing import IO, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from maxdiffusion.errors import Problem, ProblemsFound

SILENT_SECONDS = 20.0  # without a byte
LONGEST_SECONDS = 120.0  # of a whole download
MOST_REDIRECTS = 5
MEGABYTE = 1_000_000
CHUNK = 1 << 18
USER_AGENT = "maxdiffusion"  # some servers refuse the name of urllib
# Servers state these for files whose type they do not know.
UNKNOWN_TYPES = ("application/octet-stream", "binary/octet-stream", "")
BY_HAND = "Download the file yourself, and give its path"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Accepted content of a download: beginnings of its stated type, most bytes, most seconds."""

    types: tuple[str, ...]
    bytes: int
    seconds: float = LONGEST_SECONDS
    silent_seconds: float = SILENT_SECONDS


def download(name: str, address: str, limits: Limits) -> bytes:
    """Returns the content of an address; raises `ProblemsFound` that names the input `name`."""
    return b"".join(download_chunks(name, address, limits))


def download_file(name: str, address: str, limits: Limits, folder: Path) -> Path:
    """Writes the content of an address to a new file in the folder, and returns its path."""
    suffix = Path(urlsplit(address).path).suffix[:8]
    with tempfile.NamedTemporaryFile(dir=folder, suffix=suffix, delete=False) as file:
        for chunk in download_chunks(name, address, limits):
            file.write(chunk)
    return Path(file.name)


def download_chunks(name: str, address: str, limits: Limits) -> Iterator[bytes]:
    """Yields the content of an address in pieces, within the limits."""
    try:
        yield from _chunks(name, address, limits)
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, ProblemsFound):
            raise
        if isinstance(error, HTTPError):
            error.close()  # its connection
        raise _problem(name, address, f"cannot be downloaded: {_reason(error)}") from error


def _chunks(name: str, address: str, limits: Limits) -> Iterator[bytes]:
    deadline = time.monotonic() + limits.seconds
    with _open(address, limits.silent_seconds) as response:
        _check_type(name, address, response.headers, limits)
        read = 0
        while chunk := response.read1(CHUNK):
            read += len(chunk)
            if read > limits.bytes:
                raise _too_large(name, address, limits)
            if time.monotonic() > deadline:
                rule = f"took longer than {limits.seconds:g} s to download"
                raise _problem(name, address, rule)
            yield chunk
        # A connection that is lost ends `read1` like a complete body.
        if response.length:
            raise _problem(name, address, f"the connection was lost after {read} bytes")


def _check_type(name: str, address: str, headers: HTTPMessage, limits: Limits) -> None:
    """Raises if the server states another type, or too many bytes."""
    stated = headers.get("Content-Type", "").split(";")[0].strip().lower()
    if stated not in UNKNOWN_TYPES and not stated.startswith(limits.types):
        expected = " or ".join(f"{kind}*" for kind in limits.types)
        raise _problem(name, address, f"the server sends {stated}, not {expected}")
    length = headers.get("Content-Length", "")
    if length.isdigit() and int(length) > limits.bytes:
        raise _too_large(name, address, limits)


class _FewRedirects(HTTPRedirectHandler):
    """Follows a few redirects, to http(s) only."""

    max_redirections = MOST_REDIRECTS
    max_repeats = MOST_REDIRECTS

    def redirect_request(
        self,
        req: Request,
        fp: IO[bytes] | BufferedIOBase,
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> Request | None:
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise HTTPError(
                newurl, code, "redirects to another protocol", headers, cast(IO[bytes], fp)
            )
        return super().redirect_request(req, cast(IO[bytes], fp), code, msg, headers, newurl)


def _open(address: str, timeout: float) -> HTTPResponse:
    """Returns the response of an address after at most `MOST_REDIRECTS` redirects."""
    request = Request(address, headers={"User-Agent": USER_AGENT})
    response: HTTPResponse = build_opener(_FewRedirects).open(request, timeout=timeout)
    return response


def _reason(error: Exception) -> str:
    """Returns the reason of a failure in one short line."""
    if isinstance(error, HTTPError):
        return f"HTTP {error.code} {error.msg}".splitlines()[0]
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, TimeoutError):
        return "the server does not answer"
    return (str(reason).splitlines() or [type(reason).__name__])[0][:160]


def _too_large(name: str, address: str, limits: Limits) -> ProblemsFound:
    return _problem(name, address, f"has more than {limits.bytes / MEGABYTE:g} MB")


def _problem(name: str, address: str, rule: str) -> ProblemsFound:
    return ProblemsFound([Problem(name=name, value=shown(address), rule=rule, remedy=BY_HAND)])


def shown(address: str) -> str:
    """Returns an address for messages: without a password and without a query, which may be a key.

    Long ones are cut.
    """
    try:
        parts = urlsplit(address)
    except ValueError:
        return address[:200]
    host = parts.netloc.rpartition("@")[2]
    text = f"{parts.scheme}://{host}{parts.path}" + ("?..." if parts.query else "")
    return text if len(text) <= 200 else f"{text[:197]}..."

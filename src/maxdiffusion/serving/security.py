"""Every request passes here first: host, origin, key, size of the body. What is not allowed is not.

    Host header      a name of this server (DNS rebinding)
    Origin header    this server itself (requests that other web pages send)
    key              `Authorization: Bearer`, or the cookie of the page's login
    body             counted while it arrives

Nothing of a body is read before the key is accepted. Keys are compared in constant time.
"""

import hashlib
import hmac
import ipaddress
import logging
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maxdiffusion.config import Config
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.serving.errors import ApiError
from maxdiffusion.serving.metrics import Metrics

logger = logging.getLogger(__name__)
KEYS_VARIABLE = "MAXDIFFUSION_API_KEYS"
SHORTEST_KEY = 16
LOCAL = "local"  # the owner of all jobs where no keys are used
COOKIE = "maxdiffusion_session"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
OPEN_PATHS = ("/livez", "/readyz", "/", "/v1/session")
OPEN_FOLDER = "/page/"
CONTENT_SECURITY = (
    "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


def is_loopback(host: str) -> bool:
    """Returns whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_keys(config: Config) -> dict[str, str]:
    """Returns the API keys by owner, from the file and the environment; raises ProblemsFound."""
    lines = os.environ.get(KEYS_VARIABLE, "").splitlines()
    if config.serve_keys_file:
        try:
            lines += Path(config.serve_keys_file).expanduser().read_text().splitlines()
        except (OSError, ValueError) as error:
            rule = f"cannot be read ({error})"
            value = config.serve_keys_file
            raise ProblemsFound([Problem(name="serve_keys_file", value=value, rule=rule)]) from None
    keys: dict[str, str] = {}
    for line in (line.strip() for line in lines):
        if not line or line.startswith("#"):
            continue
        owner, colon, key = line.partition(":")
        if not colon or len(key.strip()) < SHORTEST_KEY or not owner.strip() or owner in keys:
            rule = f"lines are name:key with different names and keys of {SHORTEST_KEY} characters"
            remedy = "Make a key with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            shown = f"{owner[:20]}:..."
            raise ProblemsFound(
                [Problem(name="serve_keys_file", value=shown, rule=rule, remedy=remedy)]
            )
        keys[owner.strip()] = key.strip()
    return keys


def check_address(config: Config, keys: Mapping[str, str]) -> None:
    """Raises unless the server is closed to other machines or has keys."""
    if keys or is_loopback(config.serve_host):
        return
    raise ProblemsFound(
        [
            Problem(
                name="serve_host",
                value=config.serve_host,
                rule="other machines can reach this address, so that keys are required",
                remedy=f"Set serve_keys_file or {KEYS_VARIABLE}, or serve_host=127.0.0.1",
            )
        ]
    )


@dataclass(frozen=True, kw_only=True)
class Access:
    """Keys that may use the server, and the names it is called by."""

    keys: Mapping[str, str]
    hosts: tuple[str, ...]  # empty: any
    max_body: int

    @classmethod
    def of(cls, config: Config) -> "Access":
        """Returns the access rules of a config; raises ProblemsFound."""
        keys = read_keys(config)
        check_address(config, keys)
        names = config.serve_allowed_hosts
        if not names and not keys:
            names = (*LOOPBACK_NAMES, config.serve_host)
        return cls(
            keys=keys,
            hosts=tuple(name.lower() for name in names),
            max_body=config.serve_max_upload_bytes,
        )

    def owner_of_key(self, given: str) -> str | None:
        """Returns the owner of a key; compares with all of them, each in constant time."""
        found = None
        for owner, key in self.keys.items():
            if hmac.compare_digest(given.encode(), key.encode()):
                found = owner
        return found

    def session(self, owner: str) -> str:
        """Returns the value of a login cookie; a key that is changed ends its sessions.

        The key itself signs it, so that all servers with the same keys accept it.
        """
        text = f"maxdiffusion session of {owner}".encode()
        return hmac.new(self.keys[owner].encode(), text, hashlib.sha256).hexdigest()

    def owner_of_session(self, value: str) -> str | None:
        """Returns the owner of a login cookie."""
        found = None
        for owner in self.keys:
            if hmac.compare_digest(value.encode(), self.session(owner).encode()):
                found = owner
        return found

    def owner(self, headers: Headers, cookies: Mapping[str, str]) -> str | None:
        """Returns who sent a request; None if it has no valid key."""
        if not self.keys:
            return LOCAL
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.owner_of_key(key.strip())
        return self.owner_of_session(cookies.get(COOKIE, ""))


def host_name(header: str) -> str:
    """Returns the host of a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.rpartition(":")[0].lower() if ":" in header else header.lower()


def read_cookies(header: str) -> dict[str, str]:
    """Returns the cookies of a request."""
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return {name: value for name, _, value in pairs if name}


class Guard:
    """The outermost part of the application."""

    def __init__(self, app: ASGIApp, access: Access, metrics: Metrics):
        self._app, self._access, self._metrics = app, access, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or refuses it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no websockets
            return
        started, request_id = time.monotonic(), f"req_{uuid.uuid4().hex}"
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers["x-request-id"] = request_id
                self._observe(scope, status, time.monotonic() - started)
            await send(message)

        try:
            self._admit(scope)
        except ApiError as error:
            self._metrics.refused.labels(code=error.code).inc()
            await error.response()(scope, receive, send_with_headers)
            return
        await self._app(scope, limited(receive, self._access.max_body), send_with_headers)

    def _observe(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        path = route.path if route is not None else "none"
        self._metrics.http.labels(route=path, status=str(status)).observe(seconds)

    def _admit(self, scope: Scope) -> None:
        """Notes the owner of a request; raises ApiError if it is not allowed."""
        headers = Headers(scope=scope)
        self._check_host(headers)
        self._check_origin(scope, headers)
        owner = self._access.owner(headers, read_cookies(headers.get("cookie", "")))
        scope.setdefault("state", {})["owner"] = owner
        path = scope["path"]
        if owner is None and path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
            raise ApiError(
                401,
                "A valid key is required: Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._access.max_body:
            raise too_large(self._access.max_body)

    def _check_host(self, headers: Headers) -> None:
        name = host_name(headers.get("host", ""))
        if self._access.hosts and name not in self._access.hosts:
            message = f"This server is not called {name[:100]!r}: see serve_allowed_hosts."
            raise ApiError(403, message, code="host_not_allowed")

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Refuses what other web pages send; a person may still follow a link to the page."""
        if scope["method"] == "GET" and scope["path"] == "/":
            return
        origin, host = headers.get("origin"), headers.get("host", "")
        foreign = origin is not None and origin.partition("://")[2].lower() != host.lower()
        if foreign or headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            message = "Requests from other web pages are refused."
            raise ApiError(403, message, code="origin_not_allowed")


def limited(receive: Receive, most: int) -> Receive:
    """Returns the receiver that raises ApiError once a body has more than `most` bytes."""
    total = 0

    async def receive_counted() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > most:
            raise too_large(most)
        return message

    return receive_counted


def too_large(most: int) -> ApiError:
    """Returns the error of a body that is too large."""
    return ApiError(413, f"The body has more than {most} bytes.", code="body_too_large")

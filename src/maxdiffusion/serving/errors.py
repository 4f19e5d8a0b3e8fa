"""Errors that a client sees: one JSON object with message, type, param and code.

The `openai` package retries 408, 409, 429 and all 5xx; `x-should-retry: false` stops it where a
second attempt cannot help.
"""

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from maxdiffusion.errors import ProblemsFound

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
NO_RETRY = {"x-should-retry": "false"}
CODES_OF_STATUS = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    def response(self) -> Response:
        """Returns the answer."""
        return error_response(
            self.status, self.message, code=self.code, param=self.param, headers=self.headers
        )


def error_response(
    status: int,
    message: str,
    *,
    code: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Returns an error as the JSON object that clients expect."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status_code=status, headers=dict(headers or {}))


def refused(found: ProblemsFound) -> ApiError:
    """Returns the error of a request whose fields do not go together."""
    return bad_request(str(found), code="invalid_value", param=found.problems[0].name)


def bad_request(message: str, *, code: str, param: str | None = None) -> ApiError:
    """Returns the error of a request that is wrong."""
    return ApiError(400, message, code=code, param=param)


def not_found(identifier: str) -> ApiError:
    """Returns the error of a video that does not exist or belongs to another key."""
    return ApiError(404, f"No video {identifier[:60]!r}.", code="not_found", param="video_id")


def conflict(message: str, *, code: str) -> ApiError:
    """Returns the error of something that the state of a job forbids; no retry helps."""
    return ApiError(409, message, code=code, headers=NO_RETRY)


async def on_api_error(request: Request, error: Exception) -> Response:
    """Answers with an ApiError."""
    assert isinstance(error, ApiError)
    return error.response()


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answers with Starlette's own errors (404, 405, 413, broken forms) as objects."""
    assert isinstance(error, HTTPException)
    code = CODES_OF_STATUS.get(error.status_code, "error")
    return error_response(
        error.status_code, f"{error.detail}.", code=code, headers=dict(error.headers or {})
    )


async def on_unexpected(request: Request, error: Exception) -> Response:
    """Answers with an internal error; details go to the log only."""
    message = "The server failed. Its log has the reason."
    return error_response(500, message, code="internal_error")

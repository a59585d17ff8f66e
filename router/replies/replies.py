"""Replies over plain ASGI: JSON, and errors in the shape that the client reads.

The one place that knows OpenAI's `{"error": {"message", "type", "param", "code"}}` and Anthropic's errors. Messages are
written by this program and quote numbers at most, never what a client sent as text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.types import Scope, Send

from router.core.effects import RequestFailed
from router.request_context import context_of
from shared.primitives.errors import RequestError

Json = dict[str, Any]
Headers = Sequence[tuple[bytes, bytes]]

_TYPES = {
    404: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODES = {404: "not_found", 429: "rate_limit_exceeded", 503: "service_unavailable", 504: "timeout"}


class DisconnectedError(Exception):
    """The client has gone."""


class OverloadedError(RequestError):
    """429: this router cannot take one more of something."""

    def __init__(self, message: str, retry_after_seconds: float | None = None):
        super().__init__(message, status=429)
        self.retry_after_seconds = retry_after_seconds  # None: what is set for all


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> Json:
    """OpenAI's error object."""
    return {
        "error": {
            "message": message,
            "type": _TYPES.get(status, "invalid_request_error"),
            "param": param,
            "code": code or _CODES.get(status),
        }
    }


def failure_body(failure: RequestFailed) -> Json:
    """The error object of a request that the core has failed."""
    return error_body(failure.status, failure.message, failure.param, failure.code)


def error_of(
    scope: Scope, status: int, message: str, param: str | None = None, code: str | None = None
) -> Json:
    """The error object in the shape of the API that a request is for."""
    if speaks_anthropic(scope):
        return error_object(status, message, context_of(scope).rid)
    return error_body(status, message, param, code)


def retry_after(seconds: float | None) -> Headers:
    """The header, in whole seconds as HTTP wants it."""
    return [] if seconds is None else [(b"retry-after", str(max(1, math.ceil(seconds))).encode())]


async def send_json(send: Send, status: int, body: Any, headers: Headers = ()) -> None:
    """A complete answer."""
    await send_start(send, status, b"application/json", headers)
    await send({"type": "http.response.body", "body": msgspec.json.encode(body)})


async def send_start(send: Send, status: int, content_type: bytes, headers: Headers = ()) -> None:
    """Status and headers."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", content_type), *headers],
        }
    )


async def send_failure(scope: Scope, send: Send, failure: RequestFailed, retry_after_seconds: float) -> None:
    """The answer to a request that the core has failed before anything was sent."""
    seconds = failure.retry_after_seconds
    if seconds is None and failure.status in (429, 503):
        seconds = retry_after_seconds
    body = error_of(scope, failure.status, failure.message, failure.param, failure.code)
    await send_json(send, failure.status, body, retry_after(seconds))


async def send_request_error(
    scope: Scope, send: Send, error: RequestError, retry_after_seconds: float
) -> None:
    """The answer to a request that was refused here."""
    context_of(scope).connection.count_refusal(error.status)
    failure = RequestFailed(error.status, error.message, code=error.code, param=error.param)
    seconds = error.retry_after_seconds if isinstance(error, OverloadedError) else None
    await send_failure(scope, send, failure, retry_after_seconds if seconds is None else seconds)


# ---- Errors as Anthropic's clients read them: `{"type": "error", "error": {"type", "message"}, "request_id"}` --------
# The statuses are those of the other APIs. Anthropic answers 529 when it has no room, which no list of HTTP statuses
# has: here that is 503, as for every other client, and its type says `overloaded_error`, which is what clients look at.


PATH = "/v1/messages"

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request is for this API, or of a client of Anthropic's to another path."""
    path: str = scope["path"]
    return path.startswith(PATH) or b"anthropic-version" in dict(scope["headers"])


def error_object(status: int, message: str, rid: str | None = None) -> dict[str, Any]:
    """Anthropic's error object; `rid` leads to what became of the request."""
    error = {"type": _ANTHROPIC_TYPES.get(status, "invalid_request_error"), "message": message}
    return {"type": "error", "error": error} | ({"request_id": rid} if rid else {})

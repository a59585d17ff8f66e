"""Errors as Anthropic's clients read them: `{"type": "error", "error": {"type", "message"}, "request_id"}`.

The statuses are those of the other APIs. Anthropic answers 529 when it has no room, which no list of HTTP statuses has:
here that is 503, as for every other client, and its type says `overloaded_error`, which is what clients look at.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

PATH = "/v1/messages"

_TYPES = {
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
    error = {"type": _TYPES.get(status, "invalid_request_error"), "message": message}
    return {"type": "error", "error": error} | ({"request_id": rid} if rid else {})

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

    def __init__(self, message: str, full: str = "", retry_after_seconds: float | None = None):
        """`full` says in one word, for metrics, of what there is no more; a copy has it set behind this."""
        super().__init__(message, status=429)
        self.full = full
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


async def send_failure(
    scope: Scope, send: Send, failure: RequestFailed, retry_after_seconds: float, full: str = ""
) -> None:
    """The answer to a request that the core has failed before anything was sent; `full`: of what there is no more."""
    seconds = failure.retry_after_seconds
    if seconds is None and failure.status in (429, 503):
        seconds = retry_after_seconds
    context_of(scope).code = full or failure.code or ""
    body = error_of(scope, failure.status, failure.message, failure.param, failure.code)
    await send_json(send, failure.status, body, retry_after(seconds))


async def send_request_error(
    scope: Scope, send: Send, error: RequestError, retry_after_seconds: float
) -> None:
    """The answer to a request that was refused here."""
    full = error.full if isinstance(error, OverloadedError) else ""
    context_of(scope).connection.count_refusal(error.status, full)
    failure = RequestFailed(error.status, error.message, code=error.code, param=error.param)
    seconds = error.retry_after_seconds if isinstance(error, OverloadedError) else None
    await send_failure(scope, send, failure, retry_after_seconds if seconds is None else seconds, full)


# ---- errors as Anthropic's clients read them: `{"type": "error", "error": {"type", "message"}, "request_id"}` --------
# The statuses are those of the other APIs. Anthropic answers 529 when it has no room, which no list of HTTP statuses
# has: here that is 503, as for every other client, and its type says `overloaded_error`, which is what clients look at.


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
    return path.startswith("/v1/messages") or b"anthropic-version" in dict(scope["headers"])


def error_object(status: int, message: str, rid: str | None = None) -> dict[str, Any]:
    """Anthropic's error object; `rid` leads to what became of the request."""
    error = {"type": _ANTHROPIC_TYPES.get(status, "invalid_request_error"), "message": message}
    return {"type": "error", "error": error} | ({"request_id": rid} if rid else {})


# ---- every path of the API, and the paths of other servers that are not served: why, and what there is instead -------
# Data alone. `/` and an unknown path list the served ones.


SERVED_PATHS = {
    "/v1/chat/completions": "POST: the next message of a chat",
    "/v1/responses": "POST: the same in OpenAI's newer form; nothing is stored",
    "/v1/messages": "POST: the same in Anthropic's form",
    "/v1/messages/count_tokens": "POST: how long the prompt of such a request is",
    "/v1/completions": "POST: the continuation of a text",
    "/v1/models": "GET: the model's name, and its context length",
    "/tokenize": "POST: the token ids of a text or a chat",
    "/detokenize": "POST: the text of token ids",
    "/tokenizer_info": "GET: the tokenizer's special tokens and its chat template",
    "/health": "GET: whether requests are served; /ping is the same",
    "/version": "GET: this program's version",
}

_POOLED = "the model generates text: a vector of a prompt is a model's of another kind"
_STATELESS = "nothing is stored here: send the whole conversation"
_TEXT_ONLY = "this server reads and writes text only"
_ONE_MODEL = "this server has one model, as it is"

# By the beginning of the path. Without `/v1` as well, where a client was given an address that lacks it.
REFUSED_PATHS = {
    "/v1/embeddings": _POOLED,
    "/v1/score": _POOLED,
    "/v1/rerank": _POOLED,
    "/v2/rerank": _POOLED,
    "/v1/classify": _POOLED,
    "/v1/pooling": _POOLED,
    "/score": _POOLED,
    "/rerank": _POOLED,
    "/classify": _POOLED,
    "/pooling": _POOLED,
    "/v1/conversations": _STATELESS,
    "/v1/assistants": _STATELESS,
    "/v1/threads": _STATELESS,
    "/v1/files": _STATELESS,
    "/v1/uploads": _STATELESS,
    "/v1/vector_stores": _STATELESS,
    "/v1/batches": "send the requests as they are: they wait in one queue, and are served fairly",
    "/v1/audio": _TEXT_ONLY,
    "/v1/images": _TEXT_ONLY,
    "/v1/videos": _TEXT_ONLY,
    "/v1/realtime": _TEXT_ONLY,
    "/v1/moderations": "nothing is moderated here",
    "/v1/fine_tuning": _ONE_MODEL,
    "/v1/load_lora_adapter": _ONE_MODEL,
    "/v1/unload_lora_adapter": _ONE_MODEL,
    "/v1/messages/batches": "send the requests as they are: they wait in one queue, and are served fairly",
    "/v1/complete": "it is Anthropic's; use /v1/messages",
    "/api/chat": "it is Ollama's; use /v1/chat/completions",
    "/api/generate": "it is Ollama's; use /v1/completions",
    "/api/tags": "it is Ollama's; use /v1/models",
    "/generate": "it is SGLang's; use /v1/completions",
    "/inference/v1/generate": "it is vLLM's; use /v1/completions with token ids",
    "/openai/deployments": "it is Azure's; use /v1",
}
ADMIN_PATHS = ("/metrics", "/livez", "/readyz", "/debug", "/live")


def describe_unknown(path: str) -> str:
    """What a client is told that asked for a path which is not served. The path is its text and is not repeated."""
    for known in ADMIN_PATHS:
        if _begins(path, known):
            return f"{known} is on the admin port"
    for known, reason in REFUSED_PATHS.items():
        if _begins(path, known):
            return f"{known} is not served: {reason}"
    for known in SERVED_PATHS:
        if path.rstrip("/") in (known, known.removeprefix("/v1"), f"/v1{known}"):
            return f"there is nothing at this path; did you mean {known}?"
    return f"there is nothing at this path; there are {', '.join(SERVED_PATHS)}"


def _begins(path: str, known: str) -> bool:
    return path == known or path.startswith(f"{known}/")

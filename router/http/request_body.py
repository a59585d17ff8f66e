"""Reading a request's body: bounded while it arrives, then decoded as JSON, then checked against a struct.

A body that is too large is answered at once. The rest of it is read and discarded for a moment before the connection
closes: closing on unread bytes would reset the connection, and the client would never see the answer.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from router.config import RouterConfig
from router.http.responses import DisconnectedError, OverloadedError, error_body
from shared.errors import RequestError

LINGER_SECONDS = 2.0  # the rest of a body that is too large is discarded for at most this long
LINGER_BYTES_MAX = 64 << 20  # and at most this much of it

StructT = TypeVar("StructT", bound=msgspec.Struct)

_AT_FIELD = re.compile(r" - at `\$\.?(.+?)`$")
_MISSING_FIELD = re.compile(r"missing required field `(\w+)`")


class TooLargeError(RequestError):
    """413: the body is above `max_body_bytes`."""


class BodyReader:
    """Reads bodies; knows how many bytes of bodies this process holds."""

    def __init__(self, settings: RouterConfig):
        self._settings = settings
        self._held_bytes = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. Raises `RequestError`, `TooLargeError` or `DisconnectedError`."""
        declared = _content_length(scope)
        if declared is not None and declared > self._settings.max_body_bytes:
            raise self._too_large()
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(self._settings.body_seconds_max):
                await self._collect(receive, chunks)
        except TimeoutError:
            seconds = self._settings.body_seconds_max
            raise RequestError(f"the body did not arrive within {seconds:g} seconds") from None
        finally:
            self._held_bytes -= sum(map(len, chunks))
        return b"".join(chunks)

    async def _collect(self, receive: Receive, chunks: list[bytes]) -> None:
        body_bytes, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise DisconnectedError
            chunk = message.get("body", b"")
            more = message.get("more_body", False)
            body_bytes += len(chunk)
            self._held_bytes += len(chunk)
            chunks.append(chunk)
            if body_bytes > self._settings.max_body_bytes:
                raise self._too_large()
            if self._held_bytes > self._settings.bodies_bytes_max:
                raise OverloadedError("too many large requests are arriving: try again later")

    def _too_large(self) -> TooLargeError:
        return TooLargeError(
            f"the body must not exceed {self._settings.max_body_bytes} bytes",
            status=413,
            code="request_too_large",
        )


async def refuse_too_large(error: TooLargeError, receive: Receive, send: Send) -> None:
    """Answer 413, discard the rest of the body for a moment, and let the connection close."""
    body = msgspec.json.encode(error_body(error.status, error.message, code=error.code))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            await _discard(receive)
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})


async def _discard(receive: Receive) -> None:
    discarded, more = 0, True
    while more and discarded < LINGER_BYTES_MAX:
        message = await receive()
        discarded += len(message.get("body", b""))
        more = message.get("more_body", False)


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; raises `RequestError` without quoting it."""
    try:
        decoded = msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise RequestError("the body is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {_reason(error)}") from None
    if not isinstance(decoded, dict):
        raise RequestError("the body must be a JSON object")
    return decoded


def convert(fields: dict[str, Any], struct: type[StructT]) -> StructT:
    """`fields` as a struct; raises `RequestError` that names the field and the types, not the value."""
    try:
        return msgspec.convert(fields, struct)
    except msgspec.ValidationError as error:
        text = str(error)
        at = _AT_FIELD.search(text)
        missing = _MISSING_FIELD.search(text)
        param = at.group(1) if at else None
        if missing:
            param = f"{at.group(1)}.{missing.group(1)}" if at else missing.group(1)
            raise missing_field(param) from None
        reason = text[: at.start()] if at else text
        raise RequestError(f"{param}: {reason}" if at else reason, param=param) from None


def missing_field(param: str) -> RequestError:
    """The one sentence for a field that a request lacks."""
    return RequestError(f"{param} is required", param=param)


def _reason(error: msgspec.DecodeError) -> str:
    return str(error).removeprefix("JSON is malformed: ")

"""Reading a request's body: bounded while it arrives, then decoded as JSON, straight into a struct.

A body that is too large is answered at once. What the client still sends is discarded by its connection, which also
ends a body that takes too long (`client_connection`).

Decoding never builds what is not asked for: unknown fields are passed over, and fields that may be large are kept as
their bytes (`msgspec.Raw`) until it is known how large. It holds the interpreter's lock, at 2 to 10 ms a MiB.
"""

from __future__ import annotations

import re
import threading
from codecs import BOM_UTF8
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope

from router.access.byte_budget import ByteBudget, Holding
from router.config import RouterConfig
from router.replies import DisconnectedError
from router.request_context import tenant_of
from shared.primitives.errors import RequestError

T = TypeVar("T")

_AT_FIELD = " - at `$"  # and its path, at the end of what msgspec says
_JSON_TYPES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}
_PYTHON_TYPE = re.compile(rf"\b(?:{'|'.join(_JSON_TYPES)})\b")
_MISSING_FIELD = re.compile(r"missing required field `(\w+)`")


class BodyReader:
    """Reads bodies within the budget of this process."""

    def __init__(self, settings: RouterConfig):
        self._settings = settings
        self.budget = ByteBudget(
            settings.router_bytes_max, "too many large requests are waiting: try again later", "request_bytes"
        )

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[bytearray]:
        """The whole body, which weighs until the context ends.

        Raises `RequestError`, `OverloadedError` or `DisconnectedError`.
        """
        _check_encoding(scope)
        declared = _content_length(scope)
        if declared is not None and declared > self._settings.max_body_bytes:
            raise self._too_large()
        with self.budget.hold(tenant_of(scope)) as holding:
            yield await self._arrived(receive, holding)

    async def _arrived(self, receive: Receive, holding: Holding) -> bytearray:
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise DisconnectedError
            chunk = message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) + len(chunk) > self._settings.max_body_bytes:
                raise self._too_large()
            holding.add(len(chunk))
            body += chunk
        if body.startswith(BOM_UTF8):  # Windows' editors and PowerShell begin files so
            del body[: len(BOM_UTF8)]
        return body

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the body must not exceed {self._settings.max_body_bytes} bytes",
            status=413,
            code="request_too_large",
        )


def _check_encoding(scope: Scope) -> None:
    """Refuse a compressed body: what it holds could be any size."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            encoding = value.decode("latin-1")[:64]
            raise RequestError(
                f"Content-Encoding {encoding} is not supported: send the body as it is", status=415
            )


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None


_FIRST_USE = threading.Lock()
_prepared = cache(msgspec.json.Decoder)


def decode(body: bytes | bytearray | msgspec.Raw, kind: type[T], within: str = "") -> T:
    """`body` as `kind`; raises `RequestError` that names the field and the types, never a value.

    `within` is the field that `body` was found in.
    """
    with (
        _FIRST_USE
    ):  # msgspec prepares a type when it is first met; two threads that do so at once end the process
        _prepared(kind)  # type: ignore[arg-type]
    try:
        return msgspec.json.decode(body, type=kind)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise RequestError("the body is not valid UTF-8") from None
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error), within) from None
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise RequestError(f"the body is not valid JSON: {reason}") from None


def _wrong_field(text: str, within: str) -> RequestError:
    reason, _, path = text.rpartition(_AT_FIELD) if _AT_FIELD in text else (text, "", "")
    path = path.removeprefix(".").removesuffix("`")
    param = f"{within}.{path}" if within and path and not path.startswith("[") else within + path
    if reason.startswith(("Invalid enum value", "Invalid value")):  # which it quotes
        return RequestError(f"{param} has a value that is not known here", param=param)
    if missing := _MISSING_FIELD.search(reason):
        return missing_field(f"{param}.{missing[1]}" if param else missing[1])
    reason = _PYTHON_TYPE.sub(lambda word: _JSON_TYPES[word[0]], reason)
    if not param:
        return RequestError(f"the body must be a JSON object: {reason}")
    return RequestError(f"{param}: {reason}", param=param)


def missing_field(param: str) -> RequestError:
    """The one sentence for a field that a request lacks."""
    return RequestError(f"{param} is required", param=param)

"""One request and its answer: the two ASGI channels of the application, and the framing of what it sends.

The head of an answer waits for the first piece of its body. So an answer in one piece has a content-length, and an
application that fails before that piece can still be answered with a 500. Framings:

    counted      content-length: the application named it, or the whole body was the first piece
    chunked      HTTP/1.1, the length is unknown
    until close  HTTP/1.0, the length is unknown: chunked encoding does not exist there

This file knows no parser, no limits and no other request of its connection: see `client_connection`.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from http import HTTPStatus
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

from router.listener.request_parser import Headers, RequestHead

UNREAD_BODY_BYTES = 64 << 10  # of a body that the application has not taken; above it reading pauses
CLOSE = (b"connection", b"close")


class Framing(Enum):
    """How a client finds the end of the body."""

    COUNTED = auto()
    CHUNKED = auto()
    UNTIL_CLOSE = auto()
    NO_BODY = auto()


class ExchangeConnection(Protocol):
    """The connection, as an exchange sees it."""

    def write(self, data: bytes) -> None: ...

    async def writable(self) -> None: ...

    def pause_body(self) -> None: ...

    def resume_body(self) -> None: ...

    def answered(self, *, close: bool) -> None: ...

    def give_up(self, exchange: Exchange) -> None: ...


class Exchange:
    """A request whose head has come. `scope` is ASGI's; `default_headers` are those of every answer."""

    def __init__(self, wire: ExchangeConnection, scope: Scope, default_headers: Headers, head: RequestHead):
        self.keep_alive = head.keep_alive
        self.started = False  # the head of the answer was written
        self.complete = False  # and all of its body
        self.disconnected = False
        self.framing = Framing.COUNTED
        self._wire = wire
        self._scope = scope
        self._default_headers = default_headers
        self._expects_continue = head.expects_continue
        self._body = bytearray()
        self._body_complete = False
        self._body_taken = False  # the application was given the last of it
        self._changed = asyncio.Event()
        self._start: Message | None = None
        self._bytes_left = 0

    async def run(self, app: ASGIApp) -> None:
        """Let the application answer; an answer that it does not complete is given up."""
        try:
            await app(self._scope, self.receive, self.send)
        finally:
            if not self.complete and not self.disconnected:
                self._wire.give_up(self)

    # ---- the connection calls these ----------------------------------------------------------------------------

    def body_received(self, data: bytes) -> None:
        """A part of the request's body."""
        if self.complete:
            return
        self._body += data
        self._changed.set()
        if len(self._body) > UNREAD_BODY_BYTES:
            self._wire.pause_body()

    def body_ended(self) -> None:
        """The request is complete."""
        self._body_complete = True
        self._changed.set()

    def disconnect(self) -> None:
        """Note that the client has gone: no one will read the answer."""
        self.disconnected = True
        self._changed.set()

    # ---- the application calls these ---------------------------------------------------------------------------

    async def receive(self) -> Message:
        """ASGI: the next part of the body, then the disconnect."""
        if self._expects_continue and not (self.started or self._body_complete or self.disconnected):
            self._wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._expects_continue = False
        while not (self.disconnected or self.complete):
            if self._body or (self._body_complete and not self._body_taken):
                body, self._body = bytes(self._body), bytearray()
                self._body_taken = self._body_complete
                self._wire.resume_body()
                return {"type": "http.request", "body": body, "more_body": not self._body_taken}
            self._changed.clear()
            await self._changed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """ASGI: the head or a piece of the answer. Waits while the client leaves too much unread."""
        await self._wire.writable()
        if self.disconnected:
            return
        if self.complete or (message["type"] == "http.response.start") == (self._start is not None):
            raise RuntimeError(f"{message['type']} was sent out of turn")
        if self._start is None:
            self._start = message
        else:
            self._send_piece(message.get("body", b""), more=message.get("more_body", False))

    def _send_piece(self, body: bytes, *, more: bool) -> None:
        assert self._start is not None
        head = b"" if self.started else self._head(self._start, len(body), more)
        self._wire.write(head + self._framed(body, more))
        if not more:
            if self._bytes_left:
                raise RuntimeError(f"the answer is {self._bytes_left} bytes shorter than its content-length")
            self.complete = True
            self._changed.set()
            self._wire.answered(close=not self.keep_alive)

    def _framed(self, body: bytes, more: bool) -> bytes:
        match self.framing:
            case Framing.NO_BODY:
                return b""
            case Framing.CHUNKED:
                chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
                return chunk if more else chunk + b"0\r\n\r\n"
            case Framing.COUNTED:
                self._bytes_left -= len(body)
        return body

    def _head(self, start: Message, first_bytes: int, more: bool) -> bytes:
        """The head of the answer, whose first piece has `first_bytes`."""
        self.started = True
        status: int = start["status"]
        headers: Headers = [*self._default_headers, *start.get("headers", ())]
        names = {name.lower(): value for name, value in headers}
        headers += self._frame(status, names.get(b"content-length"), first_bytes, more)
        # The rest of a body that was not waited for is not a request: the connection cannot go on.
        if names.get(b"connection", b"").lower() == b"close" or not self._body_complete:
            self.keep_alive = False
        if not self.keep_alive and b"connection" not in names:
            headers.append(CLOSE)
        return encode_head(status, headers)

    def _frame(self, status: int, declared: bytes | None, first_bytes: int, more: bool) -> Headers:
        """Choose the framing; the headers that it needs."""
        if status in (204, 304):
            self.framing = Framing.NO_BODY
            return []
        length = int(declared) if declared is not None else None if more else first_bytes
        if self._scope["method"] == "HEAD":
            self.framing = Framing.NO_BODY
        elif length is not None:
            self._bytes_left = length
        elif self._scope["http_version"] == "1.0":
            self.framing = Framing.UNTIL_CLOSE
            self.keep_alive = False
        else:
            self.framing = Framing.CHUNKED
            return [(b"transfer-encoding", b"chunked")]
        return [] if length is None or declared is not None else [(b"content-length", b"%d" % length)]


def encode_head(status: int, headers: Headers) -> bytes:
    """Status line and headers on the wire. Raises `RuntimeError` for a header that would end its line."""
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, HTTPStatus(status).phrase.encode())]
    for name, value in headers:
        if b"\n" in value or b"\r" in value:
            raise RuntimeError("a header of the answer holds an end of line")
        lines.append(b"%b: %b\r\n" % (name, value))
    lines.append(b"\r\n")
    return b"".join(lines)

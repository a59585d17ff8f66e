"""HTTP as bytes on a socket: what an honest library would never send, and all that comes back.

Sending and reading go on at the same time, because a server may answer, and close, long before it has seen everything.
"""

from __future__ import annotations

import http.client
import io
import json
import select
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

ABUSER = "127.0.0.2"
READ_BYTES = 1 << 18
CONNECT_SECONDS_MAX = 10.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the server."""

    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict[str, Any]:
        """OpenAI's error object, which must be all that the body holds."""
        decoded = json.loads(self.body)
        assert set(decoded) == {"error"}, decoded
        assert set(decoded["error"]) == {"message", "type", "param", "code"}
        assert self.headers["content-type"] == "application/json"
        return dict(decoded["error"])


@dataclass(slots=True)
class Conversation:
    """Everything that came back over one connection."""

    raw: bytearray = field(default_factory=bytearray)
    closed: bool = False  # by the server
    method: str = "GET"  # of the first request

    def replies(self) -> list[Reply]:
        """The complete answers, in their order."""
        stream = _LeftOpen(bytes(self.raw))
        replies: list[Reply] = []
        while True:
            response = http.client.HTTPResponse(_Recorded(stream), method=self.method)  # type: ignore[arg-type]
            try:
                response.begin()
                headers = {name.lower(): value for name, value in response.getheaders()}
                body = response.read()
            except (http.client.HTTPException, ValueError):
                return replies
            if "content-length" not in headers and "transfer-encoding" not in headers and not self.closed:
                return replies  # its end is the connection's end
            replies.append(Reply(response.status, headers, body))

    def statuses(self) -> list[int]:
        """Of the complete answers."""
        return [reply.status for reply in self.replies()]


class _LeftOpen(io.BytesIO):
    def close(self) -> None:
        """The next answer is read from it, too."""


@dataclass(frozen=True)
class _Recorded:
    """What `http.client` needs of a socket."""

    stream: io.BytesIO

    def makefile(self, *_: object) -> io.BytesIO:
        return self.stream


def connect(port: int, source: str = ABUSER, receive_bytes: int = 0) -> socket.socket:
    """A connection from this address of the machine's own."""
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    try:
        connection.bind((source, 0))
        connection.settimeout(CONNECT_SECONDS_MAX)
        connection.connect(("127.0.0.1", port))
    except OSError:
        connection.close()
        raise
    return connection


def talk(
    port: int,
    data: bytes | Iterable[bytes],
    *,
    replies: int = 1,
    seconds_max: float = 20.0,
    source: str = ABUSER,
    method: str = "GET",
) -> Conversation:
    """Send `data`; return when so many answers are complete, or the server has closed, or the time is over."""
    with connect(port, source) as connection:
        return converse(connection, data, replies=replies, seconds_max=seconds_max, method=method)


def converse(
    connection: socket.socket,
    data: bytes | Iterable[bytes],
    *,
    replies: int = 1,
    seconds_max: float = 20.0,
    method: str = "GET",
) -> Conversation:
    """As `talk`, over a connection that stays open."""
    said = Conversation(method=method)
    pieces = iter([data] if isinstance(data, bytes) else data)
    unsent = memoryview(next(pieces, b""))
    deadline = time.monotonic() + seconds_max
    connection.setblocking(False)
    while time.monotonic() < deadline and not said.closed:
        if not unsent:
            unsent = memoryview(next(pieces, b""))
        if not unsent and said.raw.count(b"HTTP/1.") >= replies and len(said.replies()) >= replies:
            break
        ready = _wait(connection, select.POLLIN | (select.POLLOUT if unsent else 0), 0.05)
        if ready & ~select.POLLOUT:
            _receive(connection, said)
        if ready & select.POLLOUT and not said.closed:
            unsent = _send(connection, unsent, said)
    return said


def _wait(connection: socket.socket, events: int, seconds: float) -> int:
    """Which of these events came, or an error; 0 when none did."""
    poll = select.poll()  # `select.select` takes no descriptor above 1,023
    poll.register(connection, events)
    ready = poll.poll(1000 * seconds)
    return ready[0][1] if ready else 0


def _receive(connection: socket.socket, said: Conversation) -> None:
    try:
        received = connection.recv(READ_BYTES)
    except ConnectionError:
        received = b""
    said.raw += received
    said.closed = not received


def _send(connection: socket.socket, unsent: memoryview, said: Conversation) -> memoryview:
    try:
        return unsent[connection.send(unsent[:READ_BYTES]) :]
    except BlockingIOError:
        return unsent
    except ConnectionError:  # what it has answered may still be read
        while not said.closed:
            _receive_blocking(connection, said)
        return unsent


def _receive_blocking(connection: socket.socket, said: Conversation) -> None:
    _wait(connection, select.POLLIN, 1)
    try:
        _receive(connection, said)
    except BlockingIOError:
        said.closed = True


def post(path: str, body: bytes, *, headers: str = "", content_type: str = "application/json") -> bytes:
    """A POST as clients send it. `headers` are further lines, each with its end."""
    typed = f"Content-Type: {content_type}\r\n" if content_type else ""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{typed}{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def get(path: str, *, headers: str = "") -> bytes:
    """A GET as clients send it."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode()


def completion(prompt: object, **fields: object) -> bytes:
    """The body of a completion; it decodes to the end unless a field says otherwise."""
    return json.dumps(
        {"model": "smollm2", "prompt": prompt, "max_tokens": 1, "temperature": 0} | fields
    ).encode()


def chat(content: object, **fields: object) -> bytes:
    """The body of a chat of one message."""
    messages = [{"role": "user", "content": content}]
    return json.dumps(
        {"model": "smollm2", "messages": messages, "max_tokens": 1, "temperature": 0} | fields
    ).encode()

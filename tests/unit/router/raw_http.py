"""HTTP without a client library: bytes onto a connection, and the answers out of the bytes that come back."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any

from tests.unit.router.scripted_workers import RunningRouter

GET = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"


@dataclass(frozen=True)
class Answer:
    """One answer; `body` is without its framing."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object, which must be all there is."""
        body = json.loads(self.body)
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return dict(body["error"])


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def connect(
    router: RunningRouter, *, source: str = "127.0.0.1", receive_bytes: int = 0, timeout: float = 20
) -> socket.socket:
    host, port = router.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(timeout)
    connection.bind((source, 0))
    connection.connect((host, int(port)))
    return connection


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes; what a reset has left counts as the end."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def answered(router: RunningRouter, data: bytes) -> list[Answer]:
    """What a router answers to these bytes on one connection, which it must close within the time-out."""
    with connect(router) as connection:
        connection.sendall(data)
        return answers(received(connection))


def answers(data: bytes) -> list[Answer]:
    """Every complete answer in `data`, which must hold nothing else."""
    found = []
    while data:
        head, empty, data = data.partition(b"\r\n\r\n")
        assert empty, f"half a head: {head!r}"
        first, *lines = head.decode().split("\r\n")
        protocol, status, _ = first.split(" ", 2)
        assert protocol == "HTTP/1.1"
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        assert len(headers) == len(lines), f"a header comes twice: {lines}"
        body, data = _body(headers, data)
        if status != "100":
            found.append(Answer(int(status), headers, body))
    return found


def _body(headers: dict[str, str], data: bytes) -> tuple[bytes, bytes]:
    """The body, and what follows it."""
    if "content-length" in headers:
        length = int(headers["content-length"])
        assert len(data) >= length, "half a body"
        return data[:length], data[length:]
    if "transfer-encoding" not in headers:
        return data, b""
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        assert data[length : length + 2] == b"\r\n", "half a chunk"
        body, data = body + data[:length], data[length + 2 :]
        if not length:
            return body, data

"""The router's HTTP server: uvicorn, with the things it does not do by itself.

A port in use is one sentence. A request that is not HTTP is answered in OpenAI's error shape. A connection can be
dropped with unread data in it, which ASGI has no word for: `scope["extensions"]["segue.abort"]`. At the end of the
process running streams end with an error event instead of being waited for. And a signal only ends the serving:
uvicorn would raise it once more and so kill the process before its links have said goodbye.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.api.replies import error_body
from shared.errors import StartError

SHUTDOWN_SECONDS = 2  # for answers that are being written, after they were told to end
CONNECTIONS_WAITING = 2048  # in the kernel, before they are accepted


class Protocol(HttpToolsProtocol):
    """One client connection."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {"segue.abort": {"abort": self.transport.abort}}

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP."""
        body = msgspec.json.encode(error_body(400, msg))
        head = (
            f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server, that ends running answers when it is told to stop."""

    def __init__(self, app: ASGIApp, before_shutdown: Callable[[], None]):
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=CONNECTIONS_WAITING,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )
        self._before_shutdown = before_shutdown

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM stop the server."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self.stop)
        yield

    def stop(self) -> None:
        """Let `serve` return soon."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, end the answers, close the connections."""
        self._before_shutdown()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises `StartError` when the port is taken or not allowed."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener

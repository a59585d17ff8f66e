"""The router's HTTP server: uvicorn, with the things it does not do by itself.

A port in use is one sentence. A request that is not HTTP is answered in OpenAI's error shape. A connection can be
dropped with unread data in it, which ASGI has no word for: `scope["extensions"]["segue.abort"]`. And a signal only ends
the serving: uvicorn would raise it once more and so kill the process before its links have said goodbye.

    SIGTERM ─► unready, answers close connections ─► (endpoint lag) ─► no listener ─► (streams end, or drain) ─► end
    SIGINT, or a second SIGTERM ─► no listener, running streams end with an error event ─► end
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.config import RouterConfig
from router.http.responses import error_body
from shared.errors import StartError

SHUTDOWN_SECONDS = 2  # for answers that are being written, after they were told to end
CONNECTIONS_WAITING = 2048  # in the kernel, before they are accepted


class ClientConnection(HttpToolsProtocol):
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
    """uvicorn's server, that lets running answers end, or ends them when it is told to stop."""

    def __init__(
        self,
        app: ASGIApp,
        config: RouterConfig,
        on_leave: Callable[[], None],
        end_answers: Callable[[], None],
    ):
        super().__init__(
            uvicorn.Config(
                app,
                http=ClientConnection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=CONNECTIONS_WAITING,
            )
        )
        self._settings = config
        self._on_leave = on_leave
        self._end_answers = end_answers
        self._leaving = False
        self._drain_seconds = 0.0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM lets the server leave, SIGINT stops it."""
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.leave)
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.stop)
        yield

    def leave(self) -> None:
        """Serve on until nobody sends requests here any more, then let what runs end; asked twice, stop."""
        if self._leaving:
            self.stop()
            return
        self._leaving = True
        self._on_leave()
        for headers in (self.server_state.default_headers, self.config.encoded_headers):
            headers.append((b"connection", b"close"))  # of answers until the next tick, and from it on
        self._drain_seconds = self._settings.drain_seconds
        asyncio.get_running_loop().call_later(self._settings.endpoint_lag_seconds, self._close_the_door)

    def stop(self) -> None:
        """Let `serve` return soon; running answers end now."""
        self._drain_seconds = 0.0
        self._end_answers()
        self._close_the_door()

    def _close_the_door(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, wait for the answers as long as they may take, close the connections."""
        self.config.timeout_graceful_shutdown = math.ceil(self._drain_seconds) + SHUTDOWN_SECONDS
        end = asyncio.get_running_loop().call_later(self._drain_seconds, self._end_answers)
        await super().shutdown(sockets)
        end.cancel()


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

"""The admin port of a process: probes, metrics and what else an operator asks, on a thread of its own.

A probe must be answered while the process's loop computes, and must tell the truth when that hangs. So nothing here
waits for the loop. One thread serves all connections, each for one request:

    accept ── head (h11) ── answer ── close          at most REQUEST_SECONDS_MAX, whatever the client does

Connections are bounded. One more than CONNECTIONS_MAX closes the oldest, so silent ones keep no probe out. Web pages
read nothing here: on loopback, names that public DNS can have are refused (`host_header`), an Origin always. Which
pages there are, and what is on them, is decided by the process (`probes`, and `router.http.admin` for a router).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import h11
import structlog

from shared.errors import StartError
from shared.process.failures import describe_failure
from shared.process.host_header import is_loopback, is_private, name_in
from shared.process.listening import listening_socket
from shared.tally import Tally

CONNECTIONS_MAX = 128
CONNECTIONS_WAITING = 128  # in the kernel, before they are accepted
HEAD_BYTES_MAX = 16 << 10
REQUEST_SECONDS_MAX = 10.0  # from the connection to its end
EXHAUSTED = (
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
)  # a connection cannot be accepted for now

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AdminPage:
    """An answer."""

    status: int
    content_type: str
    body: bytes


AnswerPath = Callable[
    [str], Awaitable[AdminPage]
]  # a path without its query → its page; called on the port's thread

_FAILED = AdminPage(500, "text/plain", b"this page failed; the log says where\n")
_ONLY_READING = AdminPage(405, "text/plain", b"only GET and HEAD\n")
_NO_WEB_PAGES = AdminPage(403, "text/plain", b"web pages may not read this port\n")
_OTHER_HOST = AdminPage(403, "text/plain", b"this name is not served here: use localhost or an address\n")


class AdminPort:
    """Listens from construction to `close`. Raises `StartError` when the port is taken."""

    def __init__(self, host: str, port: int, answer: AnswerPath):
        self.listener = _listen(host, port)
        self.answer = answer
        self._any_host = not is_loopback(host)
        self.loop = asyncio.new_event_loop()
        self.open: dict[_AdminConnection, None] = {}  # oldest first
        self.loop.set_exception_handler(self._on_failure)
        self._faults = Tally()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="admin", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on; for port 0, the one that was chosen."""
        return int(self.listener.getsockname()[1])

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(RuntimeError):  # a second time
            self.loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()

    def refusal(self, request: h11.Request) -> AdminPage | None:
        """Why this request gets no page; None: it gets one."""
        if request.method not in (b"GET", b"HEAD"):
            return _ONLY_READING
        headers = dict(request.headers)
        if b"origin" in headers:
            return _NO_WEB_PAGES
        host = headers.get(b"host", b"").decode("latin-1").lower()
        return None if not host or self._any_host or is_private(name_in(host)) else _OTHER_HOST

    def _on_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Write a line about what nothing on the loop has caught.

        Without a descriptor for a connection asyncio tries again after a second, and complains once for each place in
        the kernel's queue.
        """
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in EXHAUSTED:
            loop.default_exception_handler(context)
        elif times := self._faults.add(str(error.strerror)):
            log.warning("admin.exhausted", reason=error.strerror, times=times)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve_until_closed())

    async def _serve_until_closed(self) -> None:
        server = await self.loop.create_server(
            lambda: _AdminConnection(self), sock=self.listener, backlog=CONNECTIONS_WAITING
        )
        await self._ending.wait()
        server.close()
        for connection in list(self.open):
            connection.abort()


class _AdminConnection(asyncio.Protocol):
    """One request, one answer, and the end: probes and scrapers need no more."""

    def __init__(self, port: AdminPort):
        self._port = port
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._timer = self._port.loop.call_later(REQUEST_SECONDS_MAX, transport.abort)
        if len(self._port.open) >= CONNECTIONS_MAX:
            next(iter(self._port.open)).abort()
        self._port.open[self] = None

    def connection_lost(self, _error: Exception | None) -> None:
        self._timer.cancel()
        self._port.open.pop(self, None)
        if self._answering:
            self._answering.cancel()

    def data_received(self, data: bytes) -> None:
        if self._answering or self._transport.is_closing():
            return  # a body, or a second request: neither is read
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._send(AdminPage(error.error_status_hint, "text/plain", b"this is not HTTP\n"))
            return
        if isinstance(event, h11.Request):
            self._answering = self._port.loop.create_task(self._answer(event))
        elif event is not h11.NEED_DATA:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; the connection is counted no more."""
        self._port.open.pop(self, None)
        self._transport.abort()

    async def _answer(self, request: h11.Request) -> None:
        if refusal := self._port.refusal(request):
            self._send(refusal, request)
            return
        try:
            page = await self._port.answer(request.target.partition(b"?")[0].decode("ascii", "replace"))
        except Exception as error:
            log.error("admin.failed", **describe_failure(error))
            page = _FAILED
        self._send(page, request)

    def _send(self, page: AdminPage, request: h11.Request | None = None) -> None:
        """Answer; to HEAD without the body."""
        headers = [("content-type", page.content_type), ("content-length", str(len(page.body)))]
        response = h11.Response(status_code=page.status, headers=[*headers, ("connection", "close")])
        body = b"" if request and request.method == b"HEAD" else page.body
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self._transport.write(self._http.send(event) or b"")
        self._transport.close()


def _listen(host: str, port: int) -> socket.socket:
    """Listens from now on; the thread accepts a little later."""
    try:
        listener, address = listening_socket(host)
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    try:
        listener.bind((address, port))
        listener.listen(CONNECTIONS_WAITING)
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener

"""The admin port of a process: probes, metrics and what else an operator asks, on a thread of its own.

A probe must be answered while the process's loop computes, and must tell the truth when that hangs. So nothing here
waits for the loop. One thread serves all connections, each for one request:

    first bytes (`Accepting`) ── head (h11) ── answer ── close     at most REQUEST_SECONDS_MAX, whatever the client does
                                               stream ── close     as long as the client reads, see `AdminStream`

Connections that have said something are bounded (CONNECTIONS_MAX). Where there is no room, the oldest whose head is not
complete goes, of the address with most, or else the oldest that has been answered for ANSWER_SECONDS; else the next one
waits. Silent ones keep no probe out (`Accepting`). Web pages read nothing here: on loopback, names that public DNS can
have are refused (`listening`), an Origin always; what is on other sites leads to `/` alone. Which pages there are, and
what is on them, is decided by the process (`health`, and `router.admin` for a router).
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import h11
import structlog

from shared.primitives.errors import StartError
from shared.primitives.holders import Holders
from shared.primitives.tally import Tally
from shared.process.listening import is_loopback, is_private, listening_socket, name_in
from shared.process.logs import describe_failure

CONNECTIONS_MAX = 128
CONNECTIONS_WAITING = 4096  # in the kernel, before they are accepted; Linux cuts it to somaxconn
HEAD_BYTES_MAX = 16 << 10
REQUEST_SECONDS_MAX = 10.0  # from its first bytes to its end
UNREAD_BYTES_MAX = 512 << 10  # of a stream, beside what the kernel holds
ANSWER_SECONDS = 1.0  # after these a connection that is being answered may have to go for a newer one

log = structlog.get_logger(__name__)


class AdminStream(Protocol):
    """An answer that goes on until one of both sides ends it; called on the port's thread."""

    def start(self, push: Callable[[bytes], None], end: Callable[[], None]) -> None:
        """The head is out. `push` sends bytes, `end` closes the connection; both from any thread, at any time."""

    def stop(self) -> None:
        """The connection is gone."""


@dataclass(frozen=True, slots=True)
class AdminPage:
    """An answer."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    stream: AdminStream | None = None  # follows the body


# a path without its query, and what the client accepts → its page; called on the port's thread
AnswerPath = Callable[[str, str], Awaitable[AdminPage]]

_FAILED = AdminPage(500, "text/plain", b"this page failed; the log says where\n")
_ONLY_READING = AdminPage(405, "text/plain", b"only GET and HEAD\n")
_NO_WEB_PAGES = AdminPage(403, "text/plain", b"web pages may not read this port\n")
# A page of another origin asks. A link may lead to `/` from anywhere; a stream in a hidden frame would hold a place.
_OTHER_SITES = (b"cross-site", b"same-site")
_OTHER_HOST = AdminPage(403, "text/plain", b"this name is not served here: use localhost or an address\n")


class AdminPort:
    """Listens from construction to `close`. Raises `StartError` when the port is taken."""

    def __init__(self, host: str, port: int, answer: AnswerPath):
        self.listener = _listen(host, port)
        self.answer = answer
        self._any_host = not is_loopback(host)
        self.loop = asyncio.new_event_loop()
        self.open: set[_AdminConnection] = set()  # those that have said something
        self.incomplete: Holders[_AdminConnection] = Holders()  # those whose head has not come whole
        self.answering: Holders[_AdminConnection] = Holders()  # and all others, both by address
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
        follows_link = headers.get(b"sec-fetch-mode") == b"navigate" and request.target == b"/"
        if b"origin" in headers or (headers.get(b"sec-fetch-site") in _OTHER_SITES and not follows_link):
            return _NO_WEB_PAGES
        host = headers.get(b"host", b"").decode("latin-1").lower()
        return None if not host or self._any_host or is_private(name_in(host)) else _OTHER_HOST

    def _has_room(self) -> bool:
        """Whether one more connection may be taken on, for which another may have to go."""
        return len(self.open) < CONNECTIONS_MAX or self._to_displace() is not None

    def _to_displace(self) -> _AdminConnection | None:
        """The connection that goes for a newer one."""
        oldest = self.incomplete.oldest_of_most()
        if oldest is None:
            oldest = self.answering.oldest_of_most()
            if oldest and oldest.since > self.loop.time() - ANSWER_SECONDS:
                return None
        return oldest

    def _take_on(self, accepted: socket.socket, address: str, data: bytes) -> None:
        """Serve a connection whose first bytes have come."""
        if len(self.open) >= CONNECTIONS_MAX and (oldest := self._to_displace()):
            oldest.abort()
        connection = _AdminConnection(self, accepted, address, data)
        self.open.add(connection)
        self.incomplete.add(address, connection)
        connection.start()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve_until_closed())

    async def _serve_until_closed(self) -> None:
        accepting = Accepting(self.loop, self.listener, self._take_on, self._has_room)
        accepting.start()
        await self._ending.wait()
        accepting.stop()
        for connection in list(self.open):
            connection.abort()


class _AdminConnection(asyncio.Protocol):
    """One request, one answer, and the end: probes and scrapers need no more."""

    def __init__(self, port: AdminPort, accepted: socket.socket, address: str, data: bytes):
        self._port = port
        self._accepted = accepted
        self._address = address
        self._data = data  # the first bytes
        self.since = port.loop.time()
        self._transport: asyncio.Transport | None = None
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._answering: asyncio.Task[None] | None = None
        self._stream: AdminStream | None = None

    def start(self) -> None:
        """Serve it."""
        self._timer = self._port.loop.call_later(REQUEST_SECONDS_MAX, self.abort)
        self._starting = self._port.loop.create_task(
            self._port.loop.connect_accepted_socket(lambda: self, self._accepted)
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self in self._port.open:
            self.data_received(self._data)
        else:  # it was displaced before
            transport.abort()

    def connection_lost(self, _error: Exception | None) -> None:
        self._timer.cancel()
        self._forget()
        if self._answering:
            self._answering.cancel()
        if self._stream:
            self._stream.stop()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if self._answering or self._transport.is_closing():
            return  # a body, or a second request: neither is read
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._send(AdminPage(error.error_status_hint, "text/plain", b"this is not HTTP\n"))
            return
        if isinstance(event, h11.Request):
            self._port.incomplete.discard(self._address, self)
            self._port.answering.add(self._address, self)
            self._answering = self._port.loop.create_task(self._answer(event))
        elif event is not h11.NEED_DATA:
            self._transport.close()

    def push(self, data: bytes) -> None:
        """Send a part of a stream; a client that leaves too much unread is dropped."""
        assert self._transport is not None
        if self._transport.is_closing():
            return
        self._transport.write(self._http.send(h11.Data(data=data)) or b"")
        if self._transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            self.abort()

    def abort(self) -> None:
        """Close at once; the connection is counted no more."""
        self._forget()
        if self._transport:
            self._transport.abort()

    def _forget(self) -> None:
        self._port.open.discard(self)
        self._port.incomplete.discard(self._address, self)
        self._port.answering.discard(self._address, self)

    async def _answer(self, request: h11.Request) -> None:
        if refusal := self._port.refusal(request):
            self._send(refusal, request)
            return
        try:
            path = request.target.partition(b"?")[0].decode("ascii", "replace")
            accept = dict(request.headers).get(b"accept", b"").decode("latin-1")
            page = await self._port.answer(path, accept)
        except Exception as error:
            log.error("admin.failed", **describe_failure(error))
            page = _FAILED
        self._send(page, request)

    def _send(self, page: AdminPage, request: h11.Request | None = None) -> None:
        """Answer; to HEAD without the body."""
        assert self._transport is not None
        if page.stream and request and request.method != b"HEAD":
            self._begin_stream(page, page.stream)
            return
        length = (b"content-length", b"%d" % len(page.body))
        response = h11.Response(status_code=page.status, headers=_headers(page, length))
        body = b"" if request and request.method == b"HEAD" else page.body
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self._transport.write(self._http.send(event) or b"")
        self._transport.close()

    def _begin_stream(self, page: AdminPage, stream: AdminStream) -> None:
        """Answer for as long as both sides want. Like every other, it goes for a newer one where there is no room."""
        assert self._transport is not None
        self._timer.cancel()
        self._stream = stream
        response = h11.Response(status_code=page.status, headers=_headers(page))
        self._transport.write(self._http.send(response) or b"")
        stream.start(partial(self._on_port, self.push), partial(self._on_port, self.abort))

    def _on_port(self, act: Callable[..., None], *given: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # the port was closed
            self._port.loop.call_soon_threadsafe(act, *given)


def _headers(page: AdminPage, *further: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    content_type = (b"content-type", page.content_type.encode())
    return [content_type, *page.headers, *further, (b"connection", b"close")]


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


# ---- connections come out of the listener's queue, and are handed on with their first bytes --------------------------
# A connection costs nothing but a descriptor until its client has said something:
#
#     accept ── bytes are there ──► taken on
#        └───── silence ──► kept, at most SILENT_MAX ── bytes ──► taken on
#
# While there is no room, nothing is accepted, and who speaks waits. One more than SILENT_MAX closes the oldest of the
# address with most. So a client whose first bytes follow its connection within milliseconds, as those of probes do, is
# taken on however many connect and stay silent: they would have to come at SILENT_MAX in these milliseconds. asyncio's
# own server makes a task and a transport of each connection before anything is known of it.
#
# An address may connect ACCEPTED_PER_SECOND_MAX times a second; what is beyond is closed unread, and so costs little.
# The machine's own address is exempt: there probes and those who flood may have the same one.


SILENT_MAX = 1024  # connections that are kept without a byte; at most an eighth of the process's descriptors
SILENT_SECONDS_MAX = 10.0
ACCEPTED_AT_ONCE = 64  # then the loop does what else there is
ACCEPTED_PER_SECOND_MAX = 1000  # of one address
SECOND = 1.0
OWN_ADDRESSES = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})
FIRST_BYTES_MAX = 16 << 10
RETRY_SECONDS = 1.0  # until a connection is accepted again, where there were no descriptors
ROOM_SECONDS = 0.005  # until there is room again: what is being answered takes less than a millisecond each


class Accepting:
    """Accepts from `start` to `stop`. `take_on` is given each connection that speaks, its address and first bytes.

    `has_room` says whether one more may be taken on now.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        take_on: Callable[[socket.socket, str, bytes], None],
        has_room: Callable[[], bool],
    ):
        self._loop = loop
        self._listener = listener
        self._take_on = take_on
        self._has_room = has_room
        self._speaking: deque[tuple[socket.socket, str]] = deque()  # there was no room for them
        self._since: dict[socket.socket, tuple[float, str]] = {}  # those that are silent, oldest first
        self._silent: Holders[socket.socket] = Holders()
        self._accepted: Counter[str] = Counter()  # in this second, by address
        self._silent_max = min(SILENT_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._faults = Tally()
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Accept from now on."""
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)
        self._look()

    def stop(self) -> None:
        """Close the listener and what is silent."""
        self._loop.remove_reader(self._listener)
        if self._timer:
            self._timer.cancel()
        self._listener.close()
        for connection in list(self._since):
            self._forget(connection).close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if not self._has_room():
                self._pause(ROOM_SECONDS)
                return
            try:
                connection, peer = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if times := self._faults.add(str(error.strerror)):
                    log.warning("admin.exhausted", reason=error.strerror, times=times)
                self._pause(RETRY_SECONDS)
                return
            address = str(peer[0])
            self._accepted[address] += 1
            if self._accepted[address] > ACCEPTED_PER_SECOND_MAX and address not in OWN_ADDRESSES:
                connection.close()
                continue
            connection.setblocking(False)
            self._read(connection, address)

    def _read(self, connection: socket.socket, address: str) -> None:
        """Take a connection on that has said something; keep one that has not."""
        try:
            data = connection.recv(FIRST_BYTES_MAX)
        except BlockingIOError:
            self._keep(connection, address)
            return
        except OSError:
            data = b""
        if data:
            self._take_on(connection, address, data)
        else:
            connection.close()

    def _keep(self, connection: socket.socket, address: str) -> None:
        if len(self._silent) >= self._silent_max:
            oldest = self._silent.oldest_of_most()
            assert oldest is not None
            self._forget(oldest).close()
        self._since[connection] = (self._loop.time(), address)
        self._silent.add(address, connection)
        self._loop.add_reader(connection, partial(self._speaks, connection, address))

    def _speaks(self, connection: socket.socket, address: str) -> None:
        if connection not in self._since:  # it was closed in this turn
            return
        if self._has_room():
            self._read(self._forget(connection), address)
        else:
            self._loop.remove_reader(connection)
            self._speaking.append((connection, address))
            self._pause(ROOM_SECONDS)

    def _forget(self, connection: socket.socket) -> socket.socket:
        _, address = self._since.pop(connection)
        self._silent.discard(address, connection)
        self._loop.remove_reader(connection)
        return connection

    def _look(self) -> None:
        """Close what has been silent for too long, each second, and begin to count anew."""
        self._timer = self._loop.call_later(SECOND, self._look)
        self._accepted.clear()
        end = self._loop.time() - SILENT_SECONDS_MAX
        while self._since and (oldest := next(iter(self._since))) and self._since[oldest][0] <= end:
            self._forget(oldest).close()

    def _pause(self, seconds: float) -> None:
        """Accept nothing for a moment: the listener would be ready again at once."""
        self._loop.remove_reader(self._listener)
        if not self._paused:
            self._paused = True
            self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._paused = False
        while self._speaking and self._has_room():
            self._speaks(*self._speaking.popleft())
        if self._speaking:
            self._pause(ROOM_SECONDS)
        elif self._listener.fileno() >= 0:  # it was not closed meanwhile
            self._loop.add_reader(self._listener, self._accept)

"""Clients that send or read too slowly: each connection ends within its time, and costs others nothing meanwhile.

Two groups, one after the other: those that send slowly, and those that read nothing. Each has a bound of memory of its
own. All of a group are slow at the same time, so that it takes no longer than its longest deadline.
"""

from __future__ import annotations

import functools
import re
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.abuse.target import MARKER, AbusedDeployment
from tests.abuse.wire import ABUSER, completion, connect, get, post
from tests.waiting import soon

WINDOW_SECONDS_MAX = 60.0  # the issue's: a byte a second for so long
END_SECONDS = 45.0  # for every kind: the longest deadline, of the unread, is 30 s
BYTE_SECONDS = 1.0
SENDERS_MIB = 32  # for 112 connections that send slowly or nothing
UNREAD_MIB = 64  # for two connections whose answers nobody reads
HEAD = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"


@dataclass(slots=True)
class SlowClient:
    """What it sends at once, what it then sends byte by byte, whether it reads, and when the server ended it."""

    first: bytes
    drip: bytes = b""
    reads: bool = True
    statuses: set[bytes] = field(default_factory=set)  # that a last answer may have; empty: any, or none
    copies: int = 1


def slow_body(path: str) -> SlowClient:
    """A body that never comes to its end."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9000\r\n\r\n"
    return SlowClient(head.encode(), b"{" * 9000)


KINDS = {
    "a head of a byte a second": SlowClient(b"", HEAD + b"a: b\r\n" * 20, statuses={b"408"}),
    "a URL of a byte a second": SlowClient(b"GET /", b"a" * 1000, statuses={b"408"}),
    "a second request's head of a byte a second": SlowClient(get("/v1/models"), HEAD + b"a: b\r\n" * 20),
    "silence": SlowClient(b""),
    "silence after an answer": SlowClient(get("/v1/models")),
    "silence in the middle of a line": SlowClient(b"GET /v1/mod", statuses={b"408"}),
    "a body of a byte a second": slow_body("/v1/completions"),
    "a body for an unknown path": slow_body("/nothing"),
    "a body for a path that reads none": slow_body("/v1/models"),
    "chunks of a byte a second": SlowClient(
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"1\r\n{\r\n" * 500,
    ),
    "a body that is too large and comes slowly": SlowClient(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000000\r\n\r\n", b"{" * 9000
    ),
    "answers that nobody reads": SlowClient(get("/v1/models") * 20_000, reads=False),
    "a stream that nobody reads": SlowClient(
        post(
            "/v1/completions",
            completion([f"{MARKER} {k}" for k in range(16)], max_tokens=400, stream=True, ignore_eos=True),
        )
        + get("/v1/models") * 20_000,
        reads=False,
    ),
    "a hundred heads at once": SlowClient(b"", HEAD, copies=100),
}


class SlowWindow:
    """A group of slow clients at once; for each the seconds after which the server closed, and what it said."""

    def __init__(self, port: int, kinds: dict[str, SlowClient]):
        self.closed_after: dict[str, list[float]] = {name: [] for name in kinds}
        self.suffered = ""  # what another client noticed, or more memory than allowed
        self.said: dict[str, bytes] = dict.fromkeys(kinds, b"")
        self._selector = selectors.DefaultSelector()
        self._open: dict[socket.socket, tuple[str, int]] = {}  # kind, and bytes of its drip that are sent
        self._port, self._kinds = port, kinds
        self._began = 0.0

    def begin(self) -> None:
        """Connect them all, and send what each sends at once."""
        for name, kind in self._kinds.items():
            for _ in range(kind.copies):
                self._connect(name, kind)
        self._began = time.monotonic()

    def _connect(self, name: str, kind: SlowClient) -> None:
        connection = connect(self._port, ABUSER, 0 if kind.reads else 4096)
        connection.setblocking(False)
        with_all = memoryview(kind.first)
        while with_all:
            try:
                with_all = with_all[connection.send(with_all) :]
            except OSError:  # it reads no further, or has closed
                break
        self._open[connection] = (name, 0)
        self._selector.register(connection, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the server has closed them all, or the window is over."""
        next_drip = 0.0
        while self._open and time.monotonic() - self._began < WINDOW_SECONDS_MAX:
            for key, _ in self._selector.select(0.1):
                assert isinstance(key.fileobj, socket.socket)
                self._look(key.fileobj)
            if time.monotonic() >= next_drip:
                next_drip = time.monotonic() + BYTE_SECONDS
                for connection in list(self._open):
                    self._drip(connection)
        for connection in list(self._open):
            connection.close()

    def _look(self, connection: socket.socket) -> None:
        name, _ = self._open[connection]
        if not KINDS[name].reads:
            self._selector.unregister(connection)  # its end shows in `_drip`
            return
        self._take(connection, name, connection.recv)

    def _take(self, connection: socket.socket, name: str, receive: Callable[[int], bytes]) -> None:
        try:
            said = receive(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        self.said[name] = (self.said[name] + said)[-4096:]
        if not said:
            self._ended(connection, name)

    def _ended(self, connection: socket.socket, name: str) -> None:
        self.closed_after[name].append(time.monotonic() - self._began)
        del self._open[connection]
        if connection in {key.fileobj for key in self._selector.get_map().values()}:
            self._selector.unregister(connection)
        connection.close()

    def _drip(self, connection: socket.socket) -> None:
        name, sent = self._open[connection]
        if not KINDS[name].reads:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or _has_ended(connection):
                self._ended(connection, name)
            return
        piece = KINDS[name].drip[sent : sent + 1]
        try:
            connection.send(piece)
        except BlockingIOError:
            return
        except OSError:
            return  # `_look` sees its end
        self._open[connection] = (name, sent + len(piece))


def _has_ended(connection: socket.socket) -> bool:
    """Whether the kernel knows that the peer has closed, without a byte being read (TCP_INFO's state)."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) != b"\x01"


def watched(target: AbusedDeployment, reads: bool, mib: int) -> SlowWindow:
    """What became of all slow clients that read, or of those that do not; the router may grow by so much meanwhile."""
    slow = SlowWindow(target.port, {name: kind for name, kind in KINDS.items() if kind.reads == reads})
    try:
        with target.nobody_suffers(mib):
            slow.begin()
            slow.run()
    except AssertionError as error:
        slow.suffered = str(error)
    return slow


Window = Callable[[bool], SlowWindow]


@pytest.fixture(scope="module")
def window(target: AbusedDeployment) -> Window:
    """What became of all slow clients, by whether they read; each group is watched once."""
    return functools.cache(lambda reads: watched(target, reads, SENDERS_MIB if reads else UNREAD_MIB))


@pytest.mark.parametrize(
    "reads",
    [
        pytest.param(True, id="slow senders"),
        pytest.param(False, marks=pytest.mark.aggregated, id="unread answers"),
    ],
)
def test_others_notice_nothing_of_slow_clients(window: Window, reads: bool) -> None:
    assert window(reads).suffered == ""


@pytest.mark.parametrize("name", KINDS)
def test_a_slow_client_is_ended(window: Window, name: str) -> None:
    group = window(KINDS[name].reads)
    closed_after = group.closed_after[name]
    assert len(closed_after) == KINDS[name].copies, f"still open after {WINDOW_SECONDS_MAX:g} s"
    assert max(closed_after) <= soon(END_SECONDS)
    statuses = KINDS[name].statuses
    said = re.findall(rb"HTTP/1.1 (\d{3})", group.said[name])
    assert not statuses or set(said[-1:]) <= statuses, said


def test_slow_clients_leave_nothing_behind(target: AbusedDeployment, window: Window) -> None:
    assert all(window(reads).closed_after for reads in (True, False))
    target.nothing_held_within(2)
    assert target.router().pid == target.router_pid

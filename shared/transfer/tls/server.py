"""The offering end of the TLS transport: answers the reads of workers that its listener has let in.

Each connection has a thread. It takes one request at a time, asks `OfferedMemory` whether it may be answered, and sends
portions straight out of the page memory; out of a device's memory by way of the scratch buffer. Between two portions it
looks at the lease again. All workers have one key, so reads are counted by the address that they come from. A reader
that does not read holds one frame and a socket buffer; after `SEND_SECONDS_MAX` without a byte taken its connection
ends.

    at most CONNECTIONS_MAX connections, to a worker that is alone; each SEND_BUFFER_BYTES in the kernel, and a frame
    and a scratch of PORTION_BYTES
"""

from __future__ import annotations

import os
import selectors
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import structlog

from shared.primitives.errors import TransferError
from shared.primitives.tally import Tally, is_worth_a_line
from shared.transfer.counters import KvCounters
from shared.transfer.grants import Shown, Verdict
from shared.transfer.memory import WORD_BYTES
from shared.transfer.tls.channel import PORTION_BYTES, FrameKind, TlsChannel
from shared.transfer.tls.keys import HANDSHAKE_BYTES_MAX, Handshake, TlsError, TlsKeys, Version
from shared.transfer.tls.offered_memory import OfferedMemory
from shared.transfer.tls.protocol import (
    ENDED,
    HOLDS,
    REQUEST_BYTES_MAX,
    CheckLease,
    GetPages,
    GetWord,
    Piece,
    Request,
    cut_portions,
    decode_request,
)

# Two readers of each of the 64 peers that a worker remembers; of peers with several ranks so many of each that may read
# here (`peer_ranks_max`).
CONNECTIONS_MAX = 128
SEND_BUFFER_BYTES = 512 * 1024
SEND_SECONDS_MAX = 30
IDLE_SECONDS_MAX = 120  # without a request; readers hang up earlier
REFUSAL_BYTES_MAX = 200

log = structlog.get_logger(__name__)


def set_timeouts(connection: socket.socket, *, send_seconds: int, receive_seconds: int) -> None:
    """Let the kernel end what waits longer, and notice a peer whose machine is gone. 0: no bound."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", send_seconds, 0))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", receive_seconds, 0))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@dataclass(slots=True, eq=False)
class _Client:
    """A worker that reads from here."""

    connection: socket.socket
    address: str
    version: Version
    channel: TlsChannel
    thread: threading.Thread
    shown: Shown = field(default_factory=dict)


class TlsHolder:
    """Serves page memory and lease words at `port`, until `close`."""

    def __init__(
        self, address: str, ports: range, context: ssl.SSLContext, memory: OfferedMemory, counters: KvCounters
    ):
        self._memory = memory
        self._counters = counters
        self._lock = threading.Lock()
        self._clients: set[_Client] = set()
        self._faults = Tally()
        self._closed = False
        self._listener = TlsListener(address, ports, context, self._admit, counters)
        self.port = self._listener.port

    def close(self) -> None:
        """Nothing is read from here any more: every connection and thread has ended when this returns."""
        self._listener.close()
        with self._lock:
            self._closed = True
            clients = list(self._clients)
            for client in clients:
                client.channel.cut()  # under the lock, or its number might be another file's by now
        for client in clients:
            client.thread.join()

    def _admit(self, connection: socket.socket, keys: TlsKeys) -> bool:
        """Serve it in a thread; False when there are too many. `RuntimeError`: no thread. In the listener's thread."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        set_timeouts(connection, send_seconds=SEND_SECONDS_MAX, receive_seconds=IDLE_SECONDS_MAX)
        scratch = self._memory.buffer(PORTION_BYTES)
        channel = TlsChannel(
            connection, sends_with=keys.answers, receives_with=keys.requests, scratch=scratch
        )
        thread = threading.Thread(target=lambda: self._serve(client), name="kv-holder", daemon=True)
        client = _Client(connection, connection.getpeername()[0], keys.version, channel, thread)
        with self._lock:
            if self._closed or len(self._clients) >= CONNECTIONS_MAX * self._memory.peer_ranks_max:
                return False
            self._clients.add(client)
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._clients.discard(client)
            raise
        return True

    def _serve(self, client: _Client) -> None:
        try:
            while True:
                self._answer(client, self._receive(client))
        except OSError:
            pass  # it hung up, or was silent
        except TlsError as error:
            self._count_refusal(client, str(error))
        except Exception as error:  # the fault is this process's: it has no memory, for one
            self._note_fault(error)
        finally:
            with self._lock:
                self._clients.discard(client)
            client.connection.close()

    def _receive(self, client: _Client) -> Request:
        size, kind = client.channel.receive_header()
        payload = memoryview(bytearray(min(size, REQUEST_BYTES_MAX)))
        client.channel.receive_payload(payload)
        if kind != FrameKind.REQUEST:
            raise TlsError(f"a frame of kind {kind}, where a request was expected")
        return decode_request(bytes(payload), client.version)

    def _answer(self, client: _Client, request: Request) -> None:
        if reason := self._memory.refusal(request):
            self._refuse(client, reason)
            return
        match request:
            case GetPages():
                self._answer_pages(client, request)
            case CheckLease(lease, nonce):
                holds = self._memory.grants.holds(client.shown, lease, nonce)
                self._count_read(client, answered=holds)
                client.channel.send(FrameKind.DATA, HOLDS if holds else ENDED)
            case GetWord(lease):
                self._tell_word(client, lease)

    def _answer_pages(self, client: _Client, request: GetPages) -> None:
        verdict = self._memory.verdict(client.shown, request)
        if verdict is Verdict.BEYOND:
            self._refuse(client, f"pages that are not those of lease {request.lease}")
            return
        self._count_read(client, answered=verdict is Verdict.GIVEN)
        if verdict is Verdict.GONE:
            client.channel.send(FrameKind.GONE)
        else:
            self._send_pages(client, request)

    def _send_pages(self, client: _Client, request: GetPages) -> None:
        channel = client.channel
        for portion in cut_portions([size for _, size in request.spans]):
            if not self._memory.is_open(client.shown, request):
                channel.send(FrameKind.GONE)
                return
            channel.send(FrameKind.DATA, self._gather(channel, request, portion))

    def _tell_word(self, client: _Client, lease: int) -> None:
        word = self._memory.grants.tell(client.shown, lease)
        self._count_read(client, answered=word != 0)
        if word and client.shown.get(lease) != word:
            with self._lock:
                self._counters.words_told += 1
        client.channel.send(FrameKind.DATA, word.to_bytes(WORD_BYTES, "little"))

    def _gather(self, channel: TlsChannel, request: GetPages, portion: list[Piece]) -> memoryview:
        """The portion's bytes in one row; a single piece in host memory is not copied."""
        offsets = [request.spans[piece.span][0] + piece.begin for piece in portion]
        if len(portion) == 1 and (view := self._memory.page_bytes_at(offsets[0], portion[0].size_bytes)):
            return view
        end = 0
        for offset, piece in zip(offsets, portion, strict=True):
            self._memory.read(offset, channel.scratch[end : end + piece.size_bytes])
            end += piece.size_bytes
        return channel.scratch[:end]

    def _refuse(self, client: _Client, reason: str) -> None:
        self._count_refusal(client, reason)
        client.channel.send(FrameKind.REFUSED, reason.encode()[:REFUSAL_BYTES_MAX])

    def _count_read(self, client: _Client, *, answered: bool) -> None:
        with self._lock:
            self._counters.count_read(client.address, answered=answered)

    def _count_refusal(self, client: _Client, reason: str) -> None:
        with self._lock:
            self._counters.count_read(client.address, answered=False)
            self._counters.refused_request += 1
            times = self._counters.refused_request
        if is_worth_a_line(times):
            log.warning("transfer.request_refused", peer=client.address, reason=reason, times=times)

    def _note_fault(self, error: Exception) -> None:
        with self._lock:
            times = self._faults.add(type(error).__name__)
        if times:
            log.warning("transfer.connection_failed", error=repr(error), times=times)


# ---- the listening end of the TLS transport: takes connections, and lets in those that prove a worker's key ----------
# A stranger costs a socket and a TLS state, and no thread. At most `HANDSHAKES_MAX` handshakes are under way; one more
# ends the oldest, so strangers that wait keep nobody out. Each must be over within `HANDSHAKE_SECONDS_MAX`.
#
#     connection ── TLS 1.3 ──► keys ──► admit(connection, keys): from now on it is the holder's
#                      └── no key of a worker, plain bytes, too slow, too many ──► closed and counted
#
# Knows no pages and no requests. Runs in a thread of its own.


HANDSHAKES_MAX = 16
HANDSHAKE_SECONDS_MAX = 3.0
BACKLOG = 64
RETRY_SECONDS = 0.1  # after the system had no descriptor left

Admit = Callable[[socket.socket, TlsKeys], bool]


@dataclass(slots=True)
class _Arrival:
    """A connection that has not proved anything yet."""

    connection: socket.socket
    handshake: Handshake
    deadline: float


class TlsListener:
    """Listens on one address, at the first free port of a range, until `close`."""

    def __init__(
        self, address: str, ports: range, context: ssl.SSLContext, admit: Admit, counters: KvCounters
    ):
        self._context = context
        self._admit = admit
        self._counters = counters
        self._arrivals: dict[int, _Arrival] = {}  # by descriptor, oldest first
        self._socket = _listen(address, ports)
        self.port: int = self._socket.getsockname()[1]
        self._closing = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._closing, selectors.EVENT_READ)
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._faults = Tally()
        self._retry_at = 0.0  # when to listen again; 0: it listens
        self._thread = threading.Thread(target=self._run, name="kv-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and drop the handshakes under way."""
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        for arrival in list(self._arrivals.values()):
            self._drop(arrival)
        self._selector.close()
        self._socket.close()
        os.close(self._closing)

    def _run(self) -> None:
        while True:
            ready = [key.fd for key, _ in self._selector.select(self._wait_seconds())]
            if self._closing in ready:
                return
            for descriptor in ready:
                if arrival := self._arrivals.get(descriptor):
                    self._advance(arrival)
            if self._socket.fileno() in ready:
                self._accept()
            self._watch_the_clock()

    def _wait_seconds(self) -> float | None:
        times = [arrival.deadline for arrival in self._arrivals.values()]
        times += [self._retry_at] if self._retry_at else []
        return max(0.0, min(times) - monotonic()) if times else None

    def _watch_the_clock(self) -> None:
        now = monotonic()
        for arrival in [each for each in self._arrivals.values() if each.deadline <= now]:
            self._refuse(arrival, "it took too long")
        if self._retry_at and self._retry_at <= now:
            self._listen_again(now)

    def _listen_again(self, now: float) -> None:
        try:
            self._selector.register(self._socket, selectors.EVENT_READ)
        except OSError:  # no room for another watch, either
            self._retry_at = now + RETRY_SECONDS
        else:
            self._retry_at = 0.0

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no descriptor is left: it stays readable, so look away for a moment
            self._selector.unregister(self._socket)
            self._retry_at = monotonic() + RETRY_SECONDS
            return
        if len(self._arrivals) >= HANDSHAKES_MAX:
            self._counters.refused_crowded += 1
            self._drop(next(iter(self._arrivals.values())))
        try:
            connection.setblocking(False)
            handshake = Handshake(self._context, holder=True)
            self._selector.register(connection, selectors.EVENT_READ)
        except Exception as error:  # it ends this connection, and never this thread
            self._turn_away(connection, error)
            return
        self._arrivals[connection.fileno()] = _Arrival(
            connection, handshake, monotonic() + HANDSHAKE_SECONDS_MAX
        )

    def _advance(self, arrival: _Arrival) -> None:
        try:
            received = arrival.connection.recv(HANDSHAKE_BYTES_MAX)
            if not received:
                raise TlsError("it hung up")
            answer = arrival.handshake.advance(received)
            if answer and arrival.connection.send(answer) < len(answer):
                raise TlsError("it does not read")  # an empty send buffer holds any answer
        except BlockingIOError:
            return
        except Exception as error:  # whatever a stranger sends ends that stranger, and never this thread
            self._refuse(arrival, str(error))
            return
        if keys := arrival.handshake.keys:
            self._let_in(arrival, keys)

    def _let_in(self, arrival: _Arrival, keys: TlsKeys) -> None:
        self._forget(arrival)
        try:
            arrival.connection.setblocking(True)
            admitted = self._admit(arrival.connection, keys)
        except Exception as error:  # no thread can be started, for one: the next connection may fare better
            self._turn_away(arrival.connection, error)
            return
        if not admitted:
            self._counters.refused_crowded += 1
            arrival.connection.close()

    def _turn_away(self, connection: socket.socket, error: Exception) -> None:
        """The fault is this process's: it has no thread, memory or descriptor for the connection."""
        self._counters.refused_crowded += 1
        if times := self._faults.add(type(error).__name__):
            log.warning("transfer.connection_failed", error=repr(error), times=times)
        connection.close()

    def _refuse(self, arrival: _Arrival, reason: str) -> None:
        """Count it; not each time is logged, for a stranger may try without end."""
        self._counters.refused_handshake += 1
        times = self._counters.refused_handshake
        if is_worth_a_line(times):
            log.warning("transfer.stranger_refused", reason=reason, times=times)
        self._drop(arrival)

    def _drop(self, arrival: _Arrival) -> None:
        self._forget(arrival)
        arrival.connection.close()

    def _forget(self, arrival: _Arrival) -> None:
        self._selector.unregister(arrival.connection)
        del self._arrivals[arrival.connection.fileno()]


def _listen(address: str, ports: range) -> socket.socket:
    """A listening socket at the first free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    met: Exception | None = None
    for port in ports:
        try:
            listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
        except (OSError, OverflowError) as error:  # taken, or above 65535
            met = error
            continue
        listener.setblocking(False)
        return listener
    raise TransferError(
        f"no port of {ports.start}-{ports.stop - 1} is free on {address} for KV pages ({met}): widen --kv-ports"
    ) from met

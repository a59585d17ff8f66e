"""The listening end of the TLS transport: takes connections, and lets in those that prove a worker's key.

A stranger costs a socket and a TLS state, and no thread. At most `HANDSHAKES_MAX` handshakes are under way; one more
ends the oldest, so strangers that wait keep nobody out. Each must be over within `HANDSHAKE_SECONDS_MAX`.

    connection ── TLS 1.3 ──► keys ──► admit(connection, keys): from now on it is the holder's
                     └── no key of a worker, plain bytes, too slow, too many ──► closed and counted

Knows no pages and no requests. Runs in a thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import structlog

from shared.primitives.errors import TransferError
from shared.primitives.tally import Tally, is_worth_a_line
from shared.transfer.counters import KvCounters
from shared.transfer.tls.keys import HANDSHAKE_BYTES_MAX, Handshake, TlsError, TlsKeys

HANDSHAKES_MAX = 16
HANDSHAKE_SECONDS_MAX = 3.0
BACKLOG = 64
RETRY_SECONDS = 0.1  # after the system had no descriptor left

log = structlog.get_logger(__name__)

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
        self,
        address: str,
        ports: range,
        context: ssl.SSLContext,
        admit: Admit,
        counters: KvCounters,
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
    for port in ports:
        with contextlib.suppress(OSError, OverflowError):  # taken, or above 65535
            listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
            listener.setblocking(False)
            return listener
    raise TransferError(
        f"no port of {ports.start}-{ports.stop - 1} is free on {address} for KV pages: widen --kv-ports"
    )

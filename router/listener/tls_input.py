"""What uvloop's TLS is given of a connection, and when: portions, and until it is secured in turns.

    the kernel ── PORTION_BYTES at most ──► TlsInput ──► SSLProtocol ──► ClientConnection
                                               └ a handshake waits here for its turn (`HandshakeTurns`)

Left alone, uvloop reads 256 KiB at once into a buffer of the connection's own and from there into OpenSSL's, which
grows to it; both stay as large as they once were while the connection is open, and no budget knows them. Of the first
only what was written to is memory, so with portions both keep the size of one.

A handshake computes a signature on the loop that carries the streams. Without turns all that have come are made before
anything else: three hundred at once stop every stream for a second.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import time
from collections import OrderedDict

from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]  # its stubs name the loop alone

PORTION_BYTES = 16 << 10  # that are read, or encrypted, at once: a record of TLS
CONNECTION_BYTES = 128 << 10  # of memory that a secured connection keeps at most, beside what budgets know
HANDSHAKE_SHARE = 1 / 4  # of the loop's time, for all handshakes together
TURN_SECONDS = 0.002  # in which they compute before others do; one alone may take longer
_M_MMAP_THRESHOLD, _APART_BYTES = -3, 128 << 10  # see mallopt(3)


def keep_buffers_apart() -> None:
    """Give each large buffer pages of its own in this process, as long as it is there.

    glibc begins so, and then puts them into its heap: there the untouched part of a buffer of 256 KiB is memory that
    something else has written to.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _APART_BYTES)


class HandshakeTurns:
    """Lets handshakes compute one after the other, addresses in turn, in HANDSHAKE_SHARE of the loop's time.

    How long one takes is the key's affair, from 0.2 ms (ECDSA P-256) to 3 or 4 ms (RSA of 4,096 bits): a share needs no
    number for it. An address waits behind others' oldest handshakes, never behind all of another's.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, dict[TlsInput, int]] = OrderedDict()  # with the bytes that have come
        self._rest_until = -math.inf  # by `time.perf_counter`
        self._scheduled = False

    def wait(self, address: str, connection: TlsInput, nbytes: int) -> None:
        """Let the connection go on with these bytes when it is its turn."""
        self._waiting.setdefault(address, {})[connection] = nbytes
        self._schedule()

    def leave(self, address: str, connection: TlsInput) -> None:
        """The connection has gone."""
        waiting = self._waiting.get(address)
        if waiting is not None and waiting.pop(connection, None) is not None and not waiting:
            del self._waiting[address]

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            rest_seconds = max(0.0, self._rest_until - time.perf_counter())
            asyncio.get_running_loop().call_later(rest_seconds, self._turn)

    def _turn(self) -> None:
        began = time.perf_counter()
        try:
            while self._waiting and time.perf_counter() < began + TURN_SECONDS:
                connection, nbytes = self._next()
                connection.go_on(nbytes)
        finally:
            used_seconds = time.perf_counter() - began
            # from where the last rest ends: timers are whole milliseconds, and may be early
            self._rest_until = max(self._rest_until, began) + used_seconds / HANDSHAKE_SHARE
            self._scheduled = False
            self._schedule()

    def _next(self) -> tuple[TlsInput, int]:
        """Take the oldest of the address whose turn it is."""
        address, waiting = self._waiting.popitem(last=False)
        connection = next(iter(waiting))
        nbytes = waiting.pop(connection)
        if waiting:
            self._waiting[address] = waiting
        return connection, nbytes


class TlsInput(asyncio.BufferedProtocol):
    """The protocol of a plain transport; `tls` is told what it would be told without this, in portions.

    Until the handshake is over, each portion waits for its turn, and no more is read.
    """

    transport: asyncio.Transport  # from `connection_made` on

    def __init__(self, tls: SSLProtocol, turns: HandshakeTurns, address: str):
        self.in_handshake = True
        self._tls = tls
        self._turns = turns
        self._address = address

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        self.transport = transport
        self._tls.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is no more."""
        self._turns.leave(self._address, self)
        self._tls.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        del sizehint
        buffer: memoryview = self._tls.get_buffer(PORTION_BYTES)
        return buffer[:PORTION_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """So many have come."""
        if self.in_handshake:
            self.transport.pause_reading()
            self._turns.wait(self._address, self, nbytes)
        else:
            self._tls.buffer_updated(nbytes)

    def go_on(self, nbytes: int) -> None:
        """Go on with what has come: it is this handshake's turn."""
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self._tls.buffer_updated(nbytes)

    def eof_received(self) -> bool | None:
        """The client has gone."""
        keeps_open: bool | None = self._tls.eof_received()
        return keeps_open

    def pause_writing(self) -> None:
        """Too much is unread."""
        self._tls.pause_writing()

    def resume_writing(self) -> None:
        """The client has read."""
        self._tls.resume_writing()

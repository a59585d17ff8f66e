"""What uvloop's TLS is given of a connection: portions, so that each connection costs little memory.

    the kernel ── PORTION_BYTES at most ──► TlsInput ──► SSLProtocol ──► ClientConnection

Left alone, uvloop reads 256 KiB at once into a buffer of the connection's own and from there into OpenSSL's, which
grows to it; both stay as large as they once were while the connection is open, and no budget knows them. Of the first
only what was written to is memory, so with portions both keep the size of one.
"""

from __future__ import annotations

import asyncio
import ctypes

from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]  # its stubs name the loop alone

PORTION_BYTES = 16 << 10  # that are read, or encrypted, at once: a record of TLS
CONNECTION_BYTES = 128 << 10  # of memory that a secured connection keeps at most, beside what budgets know
_M_MMAP_THRESHOLD, _APART_BYTES = -3, 128 << 10  # see mallopt(3)


def keep_buffers_apart() -> None:
    """Give each large buffer pages of its own in this process, as long as it is there.

    glibc begins so, and then puts them into its heap: there the untouched part of a buffer of 256 KiB is memory that
    something else has written to.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _APART_BYTES)


class TlsInput(asyncio.BufferedProtocol):
    """The protocol of a plain transport; `tls` is told what it would be told without this, in portions."""

    def __init__(self, tls: SSLProtocol):
        self._tls = tls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        self._tls.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is no more."""
        self._tls.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        del sizehint
        buffer: memoryview = self._tls.get_buffer(PORTION_BYTES)
        return buffer[:PORTION_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """So many have come."""
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

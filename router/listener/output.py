"""The sending side of one client connection: what the client has not read, and for how long.

    text of a stream ──► the transport's buffer ──► the kernel's buffer ──► the client
       backlog               waiting                                        acknowledged

A stream stops writing while too much waits in the transport's buffer; its text then becomes a backlog. All three weigh.
This file knows no requests and no limits but one: the seconds in which a client may read nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import socket
import struct
import termios
from collections.abc import Callable

from router.listener.tls_input import PORTION_BYTES

_TCP_INFO_BYTES_ACKED = 120  # offset of tcpi_bytes_acked in Linux's struct tcp_info


class ClientOutput:
    """Writes to one client. `on_written` is told the bytes of each write."""

    def __init__(
        self,
        transport: asyncio.Transport,
        write_seconds_max: float,
        on_written: Callable[[int], None],
        plain: asyncio.Transport | None = None,
    ):
        """`plain`: the transport below `transport`, where that is TLS; it has a buffer of its own."""
        self._transport = transport
        self._plain = plain
        self._write_seconds_max = write_seconds_max
        self._on_written = on_written
        self._backlog_bytes: Callable[[], int] = int  # of the stream that is being answered; none: 0
        self._unread = False  # whether something may be unread: nothing is measured on a silent connection
        self._writable = asyncio.Event()
        self._writable.set()
        self._deadline = math.inf
        self._progress = (0, 0)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the kernel has not taken yet."""
        below = self._plain.get_write_buffer_size() if self._plain is not None else 0
        return self._transport.get_write_buffer_size() + below

    def write(self, data: bytes) -> None:
        """Write to the client."""
        if not self._transport.is_closing():
            if self._plain is None:
                self._transport.write(data)
            else:  # TLS keeps a buffer as large as the largest write
                for at in range(0, len(data), PORTION_BYTES):
                    self._transport.write(data[at : at + PORTION_BYTES])
            self._unread = True
            self._on_written(len(data))

    def pause(self) -> None:
        """Too much waits."""
        self._writable.clear()

    def resume(self) -> None:
        """The client has read, or never will."""
        self._writable.set()

    async def writable(self) -> None:
        """Wait while too much waits."""
        if not self._writable.is_set():
            await self._writable.wait()

    def watch_backlog(self, backlog_bytes: Callable[[], int] = int) -> None:
        """Count what a stream keeps until it can be written; without an argument, no more."""
        self._backlog_bytes = backlog_bytes

    def unread_bytes(self) -> int:
        """Bytes that the client has not confirmed, in this process and in the kernel."""
        if not self._unread:
            return 0
        written = self.waiting_bytes + _kernel_bytes(self._transport)
        self._unread = written > 0
        return written + self._backlog_bytes() if written else 0

    def is_stalled(self, now: float) -> bool:
        """Whether the client has read nothing of what waits for it, for `write_seconds_max`."""
        waiting = self.waiting_bytes
        if not waiting:
            self._deadline = math.inf
            return False
        progress = waiting, _acknowledged_bytes(self._transport)
        if progress != self._progress or self._deadline == math.inf:
            self._progress = progress
            self._deadline = now + self._write_seconds_max
        return now >= self._deadline

    def reset(self) -> None:
        """End the connection; the kernel keeps nothing of what is unread."""
        connection = self._transport.get_extra_info("socket")
        if connection is not None and not self._transport.is_closing():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


def _acknowledged_bytes(transport: asyncio.Transport) -> int:
    """Bytes that the client's kernel has confirmed: a slow reader moves this long before it moves our own buffer."""
    connection = transport.get_extra_info("socket")
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES_ACKED + 8)
        return int(struct.unpack_from("=Q", info, _TCP_INFO_BYTES_ACKED)[0])
    except (AttributeError, OSError, struct.error):  # no socket, or it was closed
        return 0


def _kernel_bytes(transport: asyncio.Transport) -> int:
    """Bytes in the kernel's send buffer that the client's kernel has not confirmed."""
    connection = transport.get_extra_info("socket")
    try:
        return int(struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
    except (AttributeError, OSError, ValueError):  # no socket, or it was closed
        return 0

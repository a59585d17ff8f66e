"""A TCP transport in memory: what a protocol writes is kept, and the test says when the client reads or goes."""

from __future__ import annotations

import asyncio
from typing import Any


class MemoryTransport(asyncio.Transport):
    """The server's end of a connection. With `blocked` set nothing written leaves, as when a client does not read."""

    def __init__(self, protocol: asyncio.Protocol):
        super().__init__()
        self.written = bytearray()
        self.blocked = False
        self.reading = True
        self.closed = False
        self.eof_written = False
        self._protocol = protocol
        self._unread_bytes = 0

    def receive(self, data: bytes) -> None:
        """The client has sent `data`."""
        assert self.reading, "the transport was told to pause"
        if not self.closed:
            self._protocol.data_received(data)

    def read(self, size: int) -> None:
        """The client has read `size` bytes of those that wait."""
        self._unread_bytes -= size

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed, "nothing may be written after the end"
        assert not self.eof_written
        self.written += data
        if self.blocked:
            self._unread_bytes += len(data)

    def get_write_buffer_size(self) -> int:
        return self._unread_bytes

    def write_eof(self) -> None:
        self.eof_written = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        addresses = {"peername": ("10.0.0.9", 4000), "sockname": ("10.0.0.1", 8000)}
        return addresses.get(name, default)

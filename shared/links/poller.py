"""Waiting for one of many ZMQ sockets, at the cost of those that have news.

`zmq.Poller` asks each socket in each turn: 1 ms for the 1,200 sockets of 600 workers. Here the kernel says which
have news, and only those are asked.

The descriptor of a ZMQ socket says that something happened to it, not that there is something to read, and any call
on the socket may take that news. So a socket is asked again in the next turn after it was registered or ready, and
after `used`, which belongs behind each call on it outside of its reading. One that `read` has emptied is not: the
kernel tells of what comes next.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator

import zmq

READ_BATCH = 256  # messages read from one socket before heartbeats and commands get their turn
READ_BATCH_BYTES = 1 << 20  # or so many bytes of them: decoding a mebibyte may take 0.2 s
POLLIN = int(zmq.POLLIN)  # the enum's own `&` is a Python call

Source = zmq.Socket[bytes] | socket.socket


class SocketPoller:
    """Tells which sources can be read. All calls belong to one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._asked_again: dict[Source, None] = {}

    def register(self, source: Source) -> None:
        """Wait for this source, too."""
        self._selector.register(_descriptor(source), selectors.EVENT_READ, source)
        self._asked_again[source] = None

    def unregister(self, source: Source) -> None:
        """Forget a source, before it is closed; a no-op for one that is not registered."""
        self._asked_again.pop(source, None)
        if _descriptor(source) in self._selector.get_map():
            self._selector.unregister(_descriptor(source))

    def used(self, source: Source) -> None:
        """Something was sent on it, or it was connected: what it received since may give no sign."""
        self._asked_again[source] = None

    def poll(self, seconds: float) -> dict[Source, None]:
        """The sources that may have something to read, in no order that matters; waits up to `seconds` for the first.

        A socket that something else happened to is among them at times, and those that can be read always.
        """
        again, self._asked_again = self._asked_again, {}
        ready = {source: None for source in again if _readable(source)}
        for key, _ in self._selector.select(0 if ready else seconds):
            ready[key.data] = None
        self._asked_again.update(ready)
        return ready

    def read(self, source: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
        """The messages that have arrived, as many as one turn may take; `poll` tells of the rest.

        Most often there is one: to ask behind it whether there is another costs half as much as a read that fails. Of
        a socket that has more all are read until there is none, without a question behind each.
        """
        read_bytes = 0
        for number in range(READ_BATCH):
            try:
                frames = _next_message(source)
            except zmq.Again:
                return
            yield frames
            read_bytes += sum(map(len, frames))
            if read_bytes >= READ_BATCH_BYTES:
                return
            if number == 0 and not _has_message(source):
                self._asked_again.pop(source, None)
                return

    def close(self) -> None:
        """The sources stay open."""
        self._selector.close()


def _descriptor(source: Source) -> int:
    return int(source.get(zmq.FD)) if isinstance(source, zmq.Socket) else source.fileno()


def _readable(source: Source) -> bool:
    return _has_message(source) if isinstance(source, zmq.Socket) else _has_bytes(source)


def _has_message(source: zmq.Socket[bytes]) -> bool:
    """Whether there is a message; if not, the socket's descriptor gives a sign of the next one."""
    return bool(int(source.get(zmq.EVENTS)) & POLLIN)


def _has_bytes(source: socket.socket) -> bool:
    try:
        source.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    return True


def _next_message(source: zmq.Socket[bytes]) -> list[bytes]:
    """As `recv_multipart`, which asks the socket behind each frame whether it was the last; the frame knows."""
    frame = source.recv(zmq.NOBLOCK, copy=False)
    frames = [frame.bytes]
    while frame.more:
        frame = source.recv(zmq.NOBLOCK, copy=False)
        frames.append(frame.bytes)
    return frames

"""Waiting for one of many ZMQ sockets, at the cost of those that have news.

`zmq.Poller` asks each socket in each turn: 1 ms for the 1,200 sockets of 600 workers. Here the kernel says which
have news, and only those are asked.

The descriptor of a ZMQ socket says that something happened to it, not that there is something to read, and any call
on the socket may take that news. So a socket is asked again in the next turn after it was registered or ready, and
after `used`, which belongs behind each call on it outside of its reading.
"""

from __future__ import annotations

import selectors
import socket

import zmq

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
        """The sources that can be read, in no order that matters; waits up to `seconds` for the first."""
        again, self._asked_again = self._asked_again, {}
        ready = {source: None for source in again if _readable(source)}
        for key, _ in self._selector.select(0 if ready else seconds):
            if key.data not in ready and _readable(key.data):
                ready[key.data] = None
        self._asked_again.update(ready)
        return ready

    def close(self) -> None:
        """The sources stay open."""
        self._selector.close()


def _descriptor(source: Source) -> int:
    return int(source.get(zmq.FD)) if isinstance(source, zmq.Socket) else source.fileno()


def _readable(source: Source) -> bool:
    return (
        bool(int(source.get(zmq.EVENTS)) & zmq.POLLIN)
        if isinstance(source, zmq.Socket)
        else _has_bytes(source)
    )


def _has_bytes(source: socket.socket) -> bool:
    try:
        source.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    return True

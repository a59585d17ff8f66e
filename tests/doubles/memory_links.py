"""A router's and a worker's links within one process: for tests of the shells, and for runs without sockets.

Messages cross as bytes, so that what could not cross a socket cannot cross here either. No threads, no time: a session
ends by `drop`. The faults of a network are not played here; `shared.links.dialing` and `shared.links.listening` are
tested with them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shared.links.events import LinkEvent, PeerDown, PeerUp, Received, peer_name
from shared.wire.messages import Hello, Message, decode_from_router, decode_from_worker, encode


class MemoryLinks:
    """One end: `receive` and `send` as of `RouterLinks` and `WorkerLinks`."""

    def __init__(self, hello: Hello):
        self.hello = hello
        self.name = peer_name(hello)
        self._decode: Callable[[bytes], Message] = (
            decode_from_worker if hello.role == "router" else decode_from_router[hello.role]
        )
        self._peers: dict[str, MemoryLinks] = {}
        self._events: list[LinkEvent] = []

    def link(self, other: MemoryLinks, session: int = 1) -> None:
        """Begin a session between a router and a worker."""
        assert (self.hello.role == "router") != (other.hello.role == "router")
        for end, far in ((self, other), (other, self)):
            end._peers[far.name] = far
            end._events.append(PeerUp(far.name, msgspec.structs.replace(far.hello, session=session)))

    def drop(self, other: MemoryLinks, reason: str = "dropped") -> None:
        """End the session with `other`: what is sent from now on is lost."""
        for end, far in ((self, other), (other, self)):
            if end._peers.pop(far.name, None) is not None:
                end._events.append(PeerDown(far.name, reason))

    def end_session(self, peer: str, reason: str) -> None:
        """A router's core has dropped this worker."""
        far = self._peers.get(peer)
        if far is not None:
            self.drop(far, reason)

    def receive(self, timeout_seconds: float) -> list[LinkEvent]:
        """The events so far; never waits, because nothing else acts meanwhile."""
        del timeout_seconds
        events, self._events = self._events, []
        return events

    def send(self, peer: str, message: Message) -> None:
        """Deliver at once, or lose it when the session is over."""
        far = self._peers.get(peer)
        if far is not None:
            assert far.hello.reads(type(message)), f"{peer} does not read {type(message).__name__}"
            far._events.append(Received(self.name, far._decode(encode(message))))

"""What links report to the core of their process: a peer came, a peer went, a message arrived.

Between `PeerUp` and `PeerDown` of a peer its messages arrive in order, without gaps or repeats. After `PeerDown`
everything in flight between the two is lost: a worker cancels all requests of that router, a router treats the worker
as lost. The same peer may come up again; that is a new session, and nothing of the old one is delivered.

This file knows no sockets, so that cores can import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from shared.wire.baton import worker_name
from shared.wire.messages import Hello, Message


def peer_name(hello: Hello) -> str:
    """The name of the process that sent `hello`: one that was restarted under its uid is another peer."""
    return worker_name(hello.uid, hello.epoch)


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A session has begun; `hello` is how the other side describes itself."""

    peer: str
    hello: Hello


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The session has ended, for whatever reason; `reason` is for logs and tests, not for decisions."""

    peer: str
    reason: str


class Received(msgspec.Struct, frozen=True):
    """One message of the session that is up; never a `Hello` or a `Heartbeat`.

    A struct, as messages are: there is one for each, and making it costs a sixth of what a frozen dataclass does.
    """

    peer: str
    message: Message


LinkEvent = PeerUp | PeerDown | Received


class Links(Protocol):
    """One process's links, as its shell uses them: `RouterLinks`, `WorkerLinks` or `MemoryLinks`."""

    def receive(self, timeout_seconds: float) -> list[LinkEvent]:
        """Wait for an event up to the timeout; returns the next ones, in order. Empty: none waits."""

    def send(self, peer: str, message: Message) -> None:
        """Queue a message for the session of `peer` whose PeerUp `receive` returned; never blocks."""


class RouterSideLinks(Links, Protocol):
    """A router's links: `RouterLinks` or `MemoryLinks`."""

    def end_session(self, peer: str, reason: str) -> None:
        """End the session of a worker whose PeerUp `receive` returned; it is dialed again after a rest."""

"""Links between virtual routers and workers: in order, whole, with one latency; they end with a process.

What arrives at a process at one time is given to it as one batch, as real links do. With `encodes` each message goes
through the wire format, which costs CPU time and changes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from shared.links.events import LinkEvent, PeerDown, PeerUp, Received, peer_name
from shared.wire.messages import Hello, Message, decode_from_router, decode_from_worker, encode
from tests.simulation.world.timeline import TimelineProcess


class VirtualEndpoint(Protocol):
    """A process as the network sees it."""

    @property
    def process(self) -> TimelineProcess: ...
    @property
    def hello(self) -> Hello: ...
    def take(self, events: list[LinkEvent]) -> None: ...


@dataclass(slots=True)
class ArrivedEvents:
    """What has arrived at a process and is not given to it yet."""

    endpoint: VirtualEndpoint
    peers: dict[str, ArrivedEvents] = field(default_factory=dict)  # with a session
    events: list[LinkEvent] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class VirtualNetwork:
    """All links of a cluster. Seconds."""

    latency_seconds: float = 0.0005
    notice_seconds: float = 0.01  # until the peers of a dead process know; silence_seconds, if its node died
    encodes: bool = False
    _inboxes: dict[str, ArrivedEvents] = field(default_factory=dict)

    def add(self, endpoint: VirtualEndpoint) -> None:
        """A process has started; it has no links yet."""
        self._inboxes[peer_name(endpoint.hello)] = ArrivedEvents(endpoint)

    def connect(self, router: VirtualEndpoint, worker: VirtualEndpoint) -> None:
        """Begin a session between two processes."""
        one, other = self._inboxes[peer_name(router.hello)], self._inboxes[peer_name(worker.hello)]
        for side, peer in ((one, other), (other, one)):
            name = peer_name(peer.endpoint.hello)
            side.peers[name] = peer
            now = peer.endpoint.process.now
            self._arrive(side, PeerUp(name, peer.endpoint.hello), now + self.latency_seconds)

    def send(self, sender: VirtualEndpoint, peer: str, message: Message) -> None:
        """Give a message to the link between a process and its peer; without a session it is lost."""
        name = peer_name(sender.hello)
        if (inbox := self._inboxes[name].peers.get(peer)) is None:
            return
        if self.encodes:
            role = inbox.endpoint.hello.role
            decode = decode_from_worker if role == "router" else decode_from_router[role]
            message = decode(encode(message))
        # By the sender's own clock, which is ahead of the timeline after a turn in which it waited for its device.
        self._arrive(inbox, Received(name, message), sender.process.now + self.latency_seconds)

    def died(self, endpoint: VirtualEndpoint, notice_seconds: float | None = None) -> None:
        """A process has ended: its peers hear so; what it sent before has arrived then."""
        name = peer_name(endpoint.hello)
        seconds = self.notice_seconds if notice_seconds is None else notice_seconds
        for peer in self._inboxes.pop(name).peers.values():
            at = endpoint.process.now + seconds
            peer.endpoint.process.at(at, lambda peer=peer: self._end(peer, name))  # type: ignore[misc]

    def _end(self, inbox: ArrivedEvents, name: str) -> None:
        del inbox.peers[name]
        self._put(inbox, PeerDown(name, "the process has ended"))

    def _arrive(self, inbox: ArrivedEvents, event: LinkEvent, at: float) -> None:
        inbox.endpoint.process.at(at, lambda: self._put(inbox, event))

    def _put(self, inbox: ArrivedEvents, event: LinkEvent) -> None:
        inbox.events.append(event)
        if len(inbox.events) == 1:
            inbox.endpoint.process.after(0.0, lambda: self._hand_over(inbox))

    def _hand_over(self, inbox: ArrivedEvents) -> None:
        events, inbox.events = inbox.events, []
        inbox.endpoint.take(events)

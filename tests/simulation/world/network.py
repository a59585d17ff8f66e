"""Links between routers and workers: sessions that delay, lose, break and come again.

Within a session messages arrive in order, encoded and decoded as on the wire. What is sent into a broken session is
lost, and each side learns of it at a time of its own; only when both have, a new session begins:

    router  up ───── sends are lost ───── down ─────────── up
    worker  up ─────────────────── down ─────────── up (first: it is dialled)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from shared.links.events import LinkEvent, PeerDown, PeerUp, Received, peer_name
from shared.wire.messages import Hello, Message
from tests.doubles.novelty import Novelty
from tests.simulation.adversaries.lies import Lies
from tests.simulation.world.timeline import TimelineProcess
from tests.simulation.world.versions import read, written


class SimulatedEndpoint(Protocol):
    """A process as the network sees it."""

    @property
    def process(self) -> TimelineProcess: ...
    @property
    def hello(self) -> Hello: ...
    @property
    def accepts_sessions(self) -> bool: ...
    def deliver(self, event: LinkEvent) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFaults:
    """How links behave, in seconds."""

    latency: float = 0.001  # mean of one message's own delay
    spike: float = 0.0  # share of messages that take up to `spike_seconds`
    spike_seconds: float = 1.0
    silence_seconds: float = 1.5  # until a side notices that the other is gone
    reconnect_seconds: float = 0.5


@dataclass(slots=True, eq=False)
class Side:
    """One end of a link."""

    endpoint: SimulatedEndpoint
    up: bool = False
    torn: bool = False  # what is sent from here is lost
    gap: bool = False  # something was lost, so nothing more may arrive
    last_arrival: float = 0.0  # of what is sent from here
    peer: str = field(init=False)  # the name that the other side knows it by

    def __post_init__(self) -> None:
        self.peer = peer_name(self.endpoint.hello)

    @property
    def process(self) -> TimelineProcess:
        return self.endpoint.process


@dataclass(slots=True, eq=False)
class SimulatedLink:
    """The sessions between one router process and one worker process."""

    network: Network
    router: Side
    worker: Side
    session: int = 0

    def start_session(self) -> None:
        """Dial: the worker hears of it first. Both sides must be down."""
        if not self.router.process.alive or not self.worker.process.alive:
            return
        if not self.worker.endpoint.accepts_sessions:
            self._refuse()
            return
        self.session += 1
        for side in (self.router, self.worker):
            side.torn = side.gap = False
        session = self.session
        self.worker.process.after(self.network.latency(), lambda: self._up(self.worker, session))

    def _refuse(self) -> None:
        self.network.count("path session refused while the loop hangs")
        self.router.process.after(self.network.reconnect_seconds(), self.start_session)

    def _up(self, side: Side, session: int) -> None:
        if session != self.session:
            return
        if side.torn:  # before it was up
            self._down_later(self._other(side), "silence")
            return
        if not side.endpoint.accepts_sessions:  # any more
            self._refuse()
            return
        other = self._other(side)
        side.up = True
        side.endpoint.deliver(PeerUp(other.peer, other.endpoint.hello))
        if side is self.worker:
            self._transport(self.worker, lambda: self._up(self.router, session))

    def send(self, side: Side, message: Message) -> None:
        """Send from one side; lost unless its session is up and whole. The other side must know such messages."""
        other, name = self._other(side), type(message).__name__
        assert other.endpoint.hello.reads(type(message)), (
            f"{name} for {other.endpoint.hello.uid}, which is older"
        )
        if not side.up or side.torn:
            self.network.count("message lost")
            return
        wire, session = written(message, side.endpoint.hello), self.session
        if side is self.worker:
            wire = self.network.lies.tell(side.endpoint.hello, message, wire)
        self._transport(side, lambda: self._arrive(other, session, wire))

    def break_off(self, reason: str, *, both_ways: bool) -> bool:
        """Something between the two fails; without `both_ways` only what the worker sends is lost.

        False: there was no session.
        """
        if not (self.router.up and self.worker.up):
            return False
        self.worker.torn = True
        self.router.torn = self.router.torn or both_ways
        self._down_later(self.router, reason)
        return True

    def died(self, process: TimelineProcess) -> None:
        """One of the two processes is dead; the other hears so after a while."""
        for side in (self.router, self.worker):
            side.torn = True
            if side.process is process:
                side.up = False
            else:
                self._down_later(side, "peer died")

    def closed(self, process: TimelineProcess) -> None:
        """One of the two has closed the session and exited: what it sent before arrives first."""
        side = self.router if self.router.process is process else self.worker
        other, session = self._other(side), self.session
        if side.up and not side.torn:
            self._transport(side, lambda: self._down(other, "closed", session))
        else:
            self._down_later(other, "peer died")
        side.up = False

    def silent(self, process: TimelineProcess) -> None:
        """One of the two was frozen beyond the silence limit: the other side gives the session up."""
        for side in (self.router, self.worker):
            if side.process is not process:
                side.torn = True
                self._down(side, "silence", self.session)

    def loop_hangs(self) -> None:
        """The worker's links end the session, because its loop hangs; the router hears of it a little later."""
        if self.worker.up:
            self.network.count("path session ended because the loop hangs")
            self._down(self.worker, "loop hangs", self.session)

    def end(self, reason: str) -> None:
        """The router ends the session by itself."""
        session = self.session
        self.router.torn = self.worker.torn = self.worker.gap = True
        self.router.process.after(0.0, lambda: self._down(self.router, reason, session))

    @property
    def down(self) -> bool:
        return not self.router.up and not self.worker.up

    def _transport(self, side: Side, arrive: Callable[[], None]) -> None:
        """Let something sent from `side` arrive at the other, in order."""
        arrival = max(side.last_arrival, side.process.now + self.network.latency())
        side.last_arrival = arrival
        self._other(side).process.at(arrival, arrive)

    def _arrive(self, side: Side, session: int, wire: bytes) -> None:
        sender = self._other(side)
        if session != self.session or not side.up:
            return
        sender.gap = sender.gap or (sender.torn and self.network.loses_what_flies())
        if sender.gap:
            self.network.count("message lost")
            return
        message = self.network.lies.read(wire, lambda: read(wire, side.endpoint.hello))
        if message is None:
            self.end("it cannot be read")
            return
        if side is self.worker and self.network.lies.swallows(side.endpoint.hello, message):
            return
        self.network.count(f"message {type(message).__name__}")
        if sender.endpoint.hello.understands and not side.endpoint.hello.understands:
            self.network.count("path a field of a later version is ignored")
        if side is self.router:
            self.network.on_answer(message)
        if not isinstance(message, Novelty):  # the cores of today know no such message
            self.network.fails_at = self.network.lies.errors.get(wire, 0)
            side.endpoint.deliver(Received(sender.peer, message))
            self.network.fails_at = 0

    def _down_later(self, side: Side, reason: str) -> None:
        session = self.session
        side.process.after(self.network.notice_seconds(), lambda: self._down(side, reason, session))

    def _down(self, side: Side, reason: str, session: int) -> None:
        if session != self.session or not side.up:
            return
        other = self._other(side)
        side.up = False
        side.torn = True
        side.endpoint.deliver(PeerDown(other.peer, reason))
        if other.up:
            other.torn = True
            self._down_later(other, reason)
        elif other.process.alive:
            other.torn = True  # it may not have come up yet
            self.router.process.after(self.network.reconnect_seconds(), self.start_session)

    def _other(self, side: Side) -> Side:
        return self.worker if side is self.router else self.router


@dataclass(slots=True, eq=False)
class Network:
    """All links of a world, and their luck."""

    faults: NetworkFaults
    rng: random.Random
    count: Callable[[str], None]  # notes that something happened, by name
    lies: Lies
    on_answer: Callable[[Message], None] = lambda _: None  # what a worker says, as it arrives
    links: list[SimulatedLink] = field(default_factory=list)
    fails_at: int = 0  # the line of a core that fails at the message which arrives now; 0: it does not fail

    def connect(self, router: SimulatedEndpoint, worker: SimulatedEndpoint) -> None:
        """A router has discovered a worker: dial it."""
        link = SimulatedLink(self, Side(router), Side(worker))
        self.links.append(link)
        router.process.after(self.latency(), link.start_session)

    def send(self, sender: SimulatedEndpoint, peer: str, message: Message) -> None:
        """Give a message to the link between a process and its peer; a peer that is gone loses it."""
        for link in self.links:
            if link.router.endpoint is sender and link.worker.peer == peer:
                link.send(link.router, message)
            elif link.worker.endpoint is sender and link.router.peer == peer:
                link.send(link.worker, message)

    def end_session(self, router: SimulatedEndpoint, peer: str, reason: str) -> None:
        """A router has dropped a worker: it hears nothing of this session any more."""
        for link in self.links:
            if link.router.endpoint is router and link.worker.peer == peer:
                link.end(reason)

    def died(self, process: TimelineProcess, *, closes_links: bool = False) -> None:
        """Links of a dead process end; they are not dialled again. `closes_links`: it closed them before it exited."""
        for link in self.links_of(process):
            if closes_links:
                link.closed(process)
            else:
                link.died(process)
            self.links.remove(link)

    def silent(self, process: TimelineProcess) -> None:
        """The process sends nothing any more: its peers will notice the silence."""
        for link in self.links_of(process):
            link.silent(process)

    def links_of(self, process: TimelineProcess) -> list[SimulatedLink]:
        return [link for link in self.links if process in (link.router.process, link.worker.process)]

    @property
    def sessions(self) -> list[tuple[str, str]]:
        """Those that routers have: the uid of the router, and the worker's peer name."""
        return [(link.router.endpoint.hello.uid, link.worker.peer) for link in self.links if link.router.up]

    def latency(self) -> float:
        """Of one message, in seconds."""
        if self.rng.random() < self.faults.spike:
            self.count("message delayed")
            return self.rng.uniform(0, self.faults.spike_seconds)
        return self.rng.expovariate(1 / self.faults.latency)

    def notice_seconds(self) -> float:
        """Until a side notices: at once by a closed connection, or by silence."""
        return self.rng.choice((0.001, self.rng.uniform(0, self.faults.silence_seconds)))

    def reconnect_seconds(self) -> float:
        return self.rng.uniform(0, self.faults.reconnect_seconds)

    def loses_what_flies(self) -> bool:
        return self.rng.random() < 0.5

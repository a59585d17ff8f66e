"""Both ends of a link under a virtual clock, and a network between them that tests may tamper with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from shared.batch.effects import Note
from shared.links.counters import LinkCounters
from shared.links.dialing import Dial, HangUp, RouterEnd
from shared.links.events import LinkEvent, PeerDown, PeerUp, Received
from shared.links.listening import WorkerEnd
from shared.wire.messages import Hello, Message, encode
from tests.link_settings import link_settings

ADDRESS = "tcp://worker:1"
ROUTER = "router-a/0000000000000001"
WORKER = "decode-a/0000000000000002"
SETTINGS = link_settings(message_bytes_max=10_000)


class Cable:
    """A router's end and a worker's end, and a network between them that tests may tamper with."""

    def __init__(self, *, router_protocol: int = 1, worker_protocol: int = 1):
        self.now = 100.0
        sessions = count(1000)
        self.router = RouterEnd(
            Hello(session=0, role="router", uid="router-a", epoch=1, protocol=router_protocol),
            SETTINGS,
            LinkCounters(),
            lambda: next(sessions),
        )
        self.worker_counters = LinkCounters()
        self.worker_protocol = worker_protocol
        self.worker = self.new_worker(epoch=2)
        self.connection = b""  # "": not connected
        self.connections = count(1)
        self.cut = False  # nothing gets through
        self.to_worker: Callable[[list[list[bytes]]], list[list[bytes]]] = lambda batch: batch
        self.to_router: Callable[[list[list[bytes]]], list[list[bytes]]] = lambda batch: batch
        self.notes: list[Note] = []  # of both ends
        self.router_saw: list[LinkEvent] = []
        self.worker_saw: list[LinkEvent] = []
        self.router.connect(ADDRESS, self.now)

    def new_worker(self, epoch: int) -> WorkerEnd:
        hello = Hello(session=0, role="decode", uid="decode-a", epoch=epoch, protocol=self.worker_protocol)
        return WorkerEnd(hello, SETTINGS, self.worker_counters)

    def run(self, seconds: float = 0.0, *, worker_frozen: bool = False, router_frozen: bool = False) -> None:
        """Let this much time pass in steps of 50 ms, carrying what both ends send."""
        end = self.now + seconds
        while True:
            if not router_frozen:
                self.router.tick(self.now)
            if not worker_frozen:
                self.worker.tick(self.now)
            for _ in range(4):
                self._carry(worker_frozen, router_frozen)
            if self.now >= end:
                return
            self.now += 0.05

    def router_sends(self, message: Message, *, session: int | None = None) -> None:
        up = self.last_up(self.router_saw)
        self.router.send(up.peer, up.hello.session if session is None else session, encode(message), self.now)

    def worker_sends(self, message: Message) -> None:
        up = self.last_up(self.worker_saw)
        self.worker.send(up.peer, up.hello.session, encode(message), self.now)

    def last_up(self, events: list[LinkEvent]) -> PeerUp:
        return [event for event in events if isinstance(event, PeerUp)][-1]

    def _carry(self, worker_frozen: bool, router_frozen: bool) -> None:
        if not router_frozen:
            self._carry_to_worker(worker_frozen)
        if not worker_frozen:
            sent = [frames for connection, frames in self.worker.outgoing if connection == self.connection]
            self.worker.outgoing.clear()
            for frames in [] if self.cut else self.to_router(sent):
                self.router.receive(ADDRESS, frames, self.now)
        self.router_saw += self.router.events
        self.worker_saw += self.worker.events
        self.router.events, self.worker.events = [], []
        for end in (self.router, self.worker):
            self.notes += end.notes
            end.notes.clear()

    def _carry_to_worker(self, worker_frozen: bool) -> None:
        steps, self.router.outgoing = self.router.outgoing, []
        for step in steps:
            if isinstance(step, Dial):
                self.connection = b"connection %d" % next(self.connections)
            elif isinstance(step, HangUp):
                self.connection = b""
            elif not (self.cut or worker_frozen):
                for frames in self.to_worker([step.frames]):
                    self.worker.receive(self.connection, frames, self.now)


def downs(events: list[LinkEvent]) -> list[str]:
    return [event.reason for event in events if isinstance(event, PeerDown)]


def received(events: list[LinkEvent]) -> list[Message]:
    return [event.message for event in events if isinstance(event, Received)]


def noted(notes: list[Note]) -> list[tuple[str, str]]:
    return [(note.event, note.level) for note in notes]


def kinds(events: list[LinkEvent]) -> list[type[LinkEvent]]:
    return [type(event) for event in events]


def connected() -> Cable:
    cable = Cable()
    cable.run()
    assert kinds(cable.router_saw) == [PeerUp]
    assert kinds(cable.worker_saw) == [PeerUp]
    return cable

"""The simulated links keep the promise of the real ones: within a session all comes, in order, or nothing more."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

import pytest

from shared.links.events import LinkEvent, PeerDown, PeerUp, Received
from shared.wire.messages import Cancel, Hello, Role
from tests.doubles.novelty import Novelty
from tests.simulation.adversaries.lies import Lies
from tests.simulation.world.network import Network, NetworkFaults, SimulatedLink
from tests.simulation.world.timeline import Timeline, TimelineProcess


@dataclass
class Peer:
    """An endpoint that records its events."""

    process: TimelineProcess
    hello: Hello
    events: list[LinkEvent] = field(default_factory=list)
    accepts_sessions: bool = True

    def deliver(self, event: LinkEvent) -> None:
        self.events.append(event)

    @property
    def sessions(self) -> list[list[int]]:
        """The numbers that came, session by session."""
        numbers: list[list[int]] = []
        for event in self.events:
            if isinstance(event, PeerUp):
                numbers.append([])
            elif isinstance(event, Received) and isinstance(event.message, Cancel):
                numbers[-1].append(event.message.attempt)
        return numbers


class EchoWire:
    """A router and a worker with a link between them."""

    def __init__(self, seed: int = 0):
        self.timeline = Timeline()
        lies = Lies(lambda _: None, lambda _: None)
        self.network = Network(NetworkFaults(spike=0.3), random.Random(seed), lambda _: None, lies)
        self.router, self.worker = self.peer("router"), self.peer("decode")
        self.network.connect(self.router, self.worker)
        self.settle()

    def peer(self, role: Role) -> Peer:
        return Peer(TimelineProcess(self.timeline, role), Hello(session=0, role=role, uid=role, epoch=1))

    @property
    def link(self) -> SimulatedLink:
        return self.network.links[0]

    def send(self, number: int) -> None:
        self.network.send(self.router, "decode/0000000000000001", Cancel("r", number))

    def tear(self) -> None:
        self.link.break_off("loss", both_ways=True)

    def settle(self) -> None:
        while self.timeline.advance():
            pass


def test_messages_arrive_in_order_however_long_each_takes() -> None:
    wire = EchoWire()
    for number in range(50):
        wire.send(number)
    wire.settle()
    assert wire.worker.sessions == [[*range(50)]]


@pytest.mark.parametrize("both_ways", [True, False])
def test_both_sides_learn_of_a_broken_session_before_the_next_begins(both_ways: bool) -> None:
    wire = EchoWire()
    wire.link.break_off("loss", both_ways=both_ways)
    wire.settle()
    for peer in (wire.router, wire.worker):
        assert [type(event) for event in peer.events] == [PeerUp, PeerDown, PeerUp]


@pytest.mark.parametrize("seed", range(50))
def test_nothing_arrives_behind_a_gap(seed: int) -> None:
    wire = EchoWire(seed)
    for number in range(60):
        wire.timeline.after(0.02 * number, partial(wire.send, number))
    wire.timeline.after(0.1, wire.tear)
    wire.timeline.after(0.8, wire.tear)
    wire.settle()
    for session in wire.worker.sessions:
        assert session == sorted(session)
        assert len(session) == (session[-1] - session[0] + 1 if session else 0)


def test_a_message_that_the_other_side_does_not_know_is_a_mistake_of_its_sender() -> None:
    wire = EchoWire()
    with pytest.raises(AssertionError, match="Novelty for decode, which is older"):
        wire.network.send(wire.router, "decode/0000000000000001", Novelty("r"))


def test_a_dead_peer_is_missed_and_not_dialled_again() -> None:
    wire = EchoWire()
    wire.worker.process.kill()
    wire.network.died(wire.worker.process)
    wire.settle()
    assert [type(event) for event in wire.router.events] == [PeerUp, PeerDown]


def test_a_silent_peer_learns_of_it_when_it_is_back() -> None:
    wire = EchoWire()
    wire.worker.process.freeze()
    wire.network.silent(wire.worker.process)
    wire.settle()
    assert [type(event) for event in wire.router.events] == [PeerUp, PeerDown]
    assert [type(event) for event in wire.worker.events] == [PeerUp]
    wire.worker.process.thaw()
    wire.settle()
    assert [type(event) for event in wire.worker.events] == [PeerUp, PeerDown, PeerUp]


def test_a_loop_that_hangs_before_a_session_is_up_has_none() -> None:
    wire = EchoWire()
    wire.tear()
    dialled = wire.link.session
    while wire.link.session == dialled:
        wire.timeline.advance()
    wire.worker.accepts_sessions = False
    wire.timeline.after(5.0, lambda: setattr(wire.worker, "accepts_sessions", True))
    until = wire.timeline.now + 4.9
    while wire.timeline.now < until:
        wire.timeline.advance()
        assert not wire.link.worker.up
    wire.settle()
    assert wire.link.worker.up
    assert wire.link.router.up


def test_a_side_that_gave_a_session_up_before_it_was_up_gets_another() -> None:
    wire = EchoWire()
    wire.tear()
    dialled = wire.link.session
    while wire.link.session == dialled or not wire.link.worker.up:
        wire.timeline.advance()
    assert not wire.link.router.up
    wire.worker.process.freeze()
    wire.network.silent(wire.worker.process)
    wire.worker.process.thaw()
    wire.settle()
    assert wire.link.worker.up
    assert wire.link.router.up

"""Claims about what every worker answers its routers alike: loads, leases and the drain."""

from __future__ import annotations

import msgspec

from shared.batch.effects import Send, WorkerEffect
from shared.kv.kv_memory import KvMemory
from shared.kv.leases import LeaseCounters, LeaseTable
from shared.links.events import LinkEvent, PeerDown, PeerUp, Received
from shared.scheduling.router_sessions import RouterSessions
from shared.wire.bounds import COUNT_MAX
from shared.wire.messages import Cancel, DrainAck, Draining, Foreseen, Hello, Load, Message, Release
from tests.doubles.novelty import Novelty
from tests.unit.kv.lettered_pages import request
from tests.unit.scheduling.worker_bench import HOLDER, KV_FORMAT, PAGE_SIZE, PlainWords

LOAD_SECONDS, LEASE_SECONDS = 0.1, 5.0
HELLO = Hello(session=1, role="router", uid="router-0", epoch=1)


class SessionsAndLeases:
    """Sessions over a real lease table, and what they sent."""

    def __init__(self) -> None:
        self.effects: list[WorkerEffect] = []
        self.load = Load(queued=1)
        self.memory = KvMemory(8, PAGE_SIZE)
        self.leases = LeaseTable(
            self.memory,
            HOLDER,
            PlainWords([0] * 4),
            KV_FORMAT,
            LEASE_SECONDS,
            LeaseCounters(),
            self.effects,
            on_end=lambda req, end: None,  # noqa: ARG005
        )
        self.sessions = RouterSessions(self.leases, lambda: self.load, LOAD_SECONDS, self.effects)

    def told_at(self, seconds: float) -> dict[str, int]:
        """The pages that routers hear others have begun, by router, as a decode worker tells them at that time."""
        self.load = Load(queued=1, pages_foreseen=self.sessions.pages_foreseen)
        self.sessions.tick(seconds)
        return {peer: load.pages_foreseen for peer, load in self.sent() if isinstance(load, Load)}

    def sent(self) -> list[tuple[str, Message]]:
        """What was sent since the last look."""
        sends = [effect for effect in self.effects if isinstance(effect, Send)]
        self.effects.clear()
        return [(send.peer, send.message) for send in sends]

    def hear(self, *events: LinkEvent) -> list[LinkEvent | None]:
        return [self.sessions.on_link(event, 0.0) for event in events]

    def lease(self, rid: str) -> None:
        req = request("a", rid=rid)
        self.memory.allocate(req, 1)
        req.kv_len = len(req.token_ids)
        self.leases.grant(req, 0.0)


def test_commands_of_a_role_and_the_end_of_a_session_come_back_and_nothing_else_does() -> None:
    book = SessionsAndLeases()
    book.lease("a")
    cancel, down = Received("router", Cancel("b", 1)), PeerDown("router", "gone")
    events: list[LinkEvent] = [PeerUp("router", HELLO), cancel, Received("router", Release("a", 1)), down]
    assert book.hear(*events) == [None, cancel, None, down]
    assert len(book.leases) == 0


def test_a_router_understands_what_its_hello_lists_while_its_session_lasts() -> None:
    book = SessionsAndLeases()
    newer = msgspec.structs.replace(HELLO, understands=("Novelty",))
    book.hear(PeerUp("old", HELLO), PeerUp("new", newer))
    assert [book.sessions.understands(router, Novelty) for router in ("old", "new")] == [False, True]
    assert book.sessions.understands("old", Draining)
    book.hear(PeerDown("new", "gone"))
    assert not book.sessions.understands("new", Novelty)


def test_a_router_that_has_just_come_hears_the_load_at_once_and_then_only_changes() -> None:
    book = SessionsAndLeases()
    book.hear(PeerUp("first", HELLO))
    book.sessions.tick(1.0)
    assert book.sent() == [("first", Load(queued=1))]
    book.sessions.tick(2.0)
    assert book.sent() == []
    book.load = Load(queued=2)
    book.hear(PeerUp("second", HELLO))
    book.sessions.tick(2.01)
    assert book.sent() == [("second", Load(queued=2))]
    assert book.sessions.next_deadline() == 2.01 + LOAD_SECONDS / 2
    book.sessions.tick(2.05)
    assert book.sent() == []


def test_routers_hear_of_a_change_in_turn_each_as_often_as_if_it_were_alone() -> None:
    book = SessionsAndLeases()
    routers = ["a", "b", "c", "d"]
    book.hear(*[PeerUp(router, HELLO) for router in routers])
    book.sessions.tick(0.0)
    assert [router for router, _ in book.sent()] == routers
    heard: list[tuple[str, int]] = []
    for tick in range(1, 400):
        book.load = Load(queued=tick)
        book.sessions.tick(tick / 1000)
        told = book.sent()
        assert len(told) <= 1
        heard += [(router, tick) for router, _ in told]
    assert [router for router, _ in heard[:8]] == routers * 2
    assert all(later[1] - one[1] in (100, 101, 102) for one, later in zip(heard, heard[4:], strict=False))
    assert heard[1][1] - heard[0][1] == 25
    for _ in routers:
        book.sessions.tick(book.sessions.next_deadline() or 0.0)
    assert {message for _, message in book.sent()} == {Load(queued=399)}
    assert book.sessions.next_deadline() is None


def test_all_routers_hear_at_once_of_the_first_request() -> None:
    book = SessionsAndLeases()
    book.load = Load()
    book.hear(PeerUp("first", HELLO), PeerUp("second", HELLO))
    book.sessions.tick(1.0)
    book.sent()
    book.load = Load(queued=1)
    book.sessions.tick(1.001)
    assert book.sent() == [("first", Load(queued=1)), ("second", Load(queued=1))]
    book.load = Load()
    for seconds in (1.002, 2.0, 3.0):
        book.sessions.tick(seconds)
    assert book.sent() == [("first", Load()), ("second", Load())]


def test_each_router_hears_the_pages_that_the_others_have_begun_prompts_for() -> None:
    book = SessionsAndLeases()
    book.hear(PeerUp("first", HELLO), Received("first", Foreseen(5)))
    assert book.told_at(0.0) == {"first": -1}  # nobody else wants to know
    book.hear(PeerUp("second", HELLO))
    assert book.told_at(1.0) == {"second": 5}
    assert book.told_at(2.0) == {"first": 0}
    book.hear(Received("second", Foreseen(2)), Received("first", Foreseen(7)))
    assert [book.told_at(3.0), book.told_at(4.0)] == [{"second": 7}, {"first": 2}]
    assert book.told_at(5.0) == {}
    assert book.sessions.next_deadline() is None


def test_what_a_router_had_begun_is_forgotten_with_its_session() -> None:
    book = SessionsAndLeases()
    book.hear(*[PeerUp(router, HELLO) for router in "abc"], Received("a", Foreseen(5)))
    book.told_at(0.0)
    book.hear(PeerDown("a", "gone"))
    assert (book.told_at(1.0), book.told_at(2.0)) == ({"b": 0}, {"c": 0})
    book.hear(PeerUp("a", HELLO))
    assert book.told_at(3.0) == {"a": 0}


def test_pages_of_all_routers_together_are_a_number_that_a_router_reads() -> None:
    book = SessionsAndLeases()
    events = [(PeerUp(router, HELLO), Received(router, Foreseen(COUNT_MAX))) for router in "abc"]
    book.hear(*[event for pair in events for event in pair])
    assert book.told_at(0.0) == dict.fromkeys("abc", COUNT_MAX)


def test_every_router_hears_of_the_drain_also_one_that_comes_later() -> None:
    book = SessionsAndLeases()
    book.hear(PeerUp("first", HELLO))
    book.sessions.start_draining()
    book.hear(PeerUp("second", HELLO))
    assert book.sent() == [("first", Draining()), ("second", Draining())]


def test_a_worker_is_drained_when_every_connected_router_has_acknowledged_and_no_lease_is_left() -> None:
    book = SessionsAndLeases()
    book.lease("a")
    book.hear(PeerUp("first", HELLO), PeerUp("second", HELLO))
    book.sessions.start_draining()
    book.hear(Received("first", DrainAck()), PeerDown("second", "gone"))
    assert not book.sessions.drained
    book.hear(Received("first", Release("a", 1)))
    assert book.sessions.drained
    book.hear(PeerUp("second", HELLO))
    assert not book.sessions.drained


def test_the_next_deadline_is_the_earliest_lease_when_every_router_knows_the_load() -> None:
    book = SessionsAndLeases()
    assert book.sessions.next_deadline() is None
    book.lease("a")
    assert book.sessions.next_deadline() == LEASE_SECONDS

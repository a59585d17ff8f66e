"""Either end of a link with two peers that are up: one that misbehaves, and one that must not notice."""

from __future__ import annotations

from itertools import count

from shared.links.counters import LinkCounters
from shared.links.dialing import Dial, RouterEnd, SendFrames
from shared.links.events import PeerUp, Received
from shared.links.listening import WorkerEnd
from shared.links.session import seal
from shared.wire.messages import Cancel, Hello, Refused, encode
from tests.link_settings import link_settings

SETTINGS = link_settings(message_bytes_max=100_000, report_bytes_max=80_000)
OTHERS, FUZZED = "tcp://other:1", "tcp://fuzzed:1"


class Listening:
    """A worker's end with two routers that are up; the second is fuzzed."""

    def __init__(self) -> None:
        hello = Hello(session=0, role="prefill", uid="p", epoch=1)
        self.end = WorkerEnd(hello, SETTINGS, LinkCounters())
        for number, connection in enumerate((b"other", b"fuzzed")):
            greeting = Hello(session=number, role="router", uid=f"r{number}", epoch=2)
            self.end.receive(connection, seal(number, 0, encode(greeting)), 0.0)
        assert [type(event) for event in self.end.events] == [PeerUp, PeerUp]
        self.end.events.clear()

    def receive(self, frames: list[bytes]) -> None:
        self.end.receive(b"fuzzed", frames, 0.0)

    def other_is_served(self) -> bool:
        self.end.events.clear()
        self.end.receive(b"other", seal(0, 1, encode(Cancel("x", 0))), 0.0)
        return [event.message for event in self.end.events if isinstance(event, Received)] == [Cancel("x", 0)]


class Dialing:
    """A router's end with two workers that are up; the second is fuzzed."""

    def __init__(self) -> None:
        numbers = count(0)
        hello = Hello(session=0, role="router", uid="r", epoch=1)
        self.end = RouterEnd(hello, SETTINGS, LinkCounters(), lambda: next(numbers))
        for number, address in enumerate((OTHERS, FUZZED)):
            self.end.connect(address, 0.0)
            self.end.tick(0.0)
            greeting = Hello(session=number, role="decode", uid=f"d{number}", epoch=2)
            self.end.receive(address, seal(number, 0, encode(greeting)), 0.0)
        assert [type(event) for event in self.end.events] == [PeerUp, PeerUp]
        assert {type(step) for step in self.end.outgoing} == {Dial, SendFrames}
        self.end.events.clear()

    def receive(self, frames: list[bytes]) -> None:
        self.end.receive(FUZZED, frames, 0.0)

    def other_is_served(self) -> bool:
        self.end.events.clear()
        self.end.receive(OTHERS, seal(0, 1, encode(Refused("x", 0, "stale"))), 0.0)
        events = [event.message for event in self.end.events if isinstance(event, Received)]
        return events == [Refused("x", 0, "stale")]

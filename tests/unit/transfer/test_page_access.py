"""When a fetch settles what has arrived, and when it waits for the device: both before anybody may use the pages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from shared.transfer.memory import HostAccess
from shared.transfer.protocol import FetchEnded, FetchEvent, FetchLanded
from shared.transfer.ranks.commands import (
    MakeReader,
    PartOfPages,
    ReadEnded,
    ReadPages,
    decode_report,
    encode,
)
from shared.transfer.ranks.service import RankService
from shared.transfer.slices import parts_of
from shared.transfer.transfer import Transfer
from shared.wire.baton import Baton
from tests.doubles.in_process_transfer import InProcessFabric, InProcessOffer, InProcessReader
from tests.fetcher_contract import KV_FORMAT, LEASES, LIMITS, Clock, FetchWorld, PageBuffer, byte_of
from tests.unit.transfer.in_process_world import InProcessHolder
from tests.unit.transfer.ranked_pages import offer_command


@dataclass
class WatchedAccess(HostAccess):
    """Says when it is asked for what only a device needs."""

    calls: list[str] = field(default_factory=list)

    def enter(self) -> None:
        self.calls.append("enter")

    def settle(self) -> None:
        self.calls.append("settle")

    def fence(self) -> None:
        self.calls.append("fence")


class WatchedReader(InProcessReader):
    """Says when it is closed."""

    calls: list[str]

    def close(self) -> None:
        self.calls.append("close")
        super().close()


class WatchedOffer(InProcessOffer):
    """Makes readers that say when they are closed."""

    calls: list[str]

    def make_reader(self, slots: int) -> WatchedReader:
        reader = WatchedReader(self._fabric, slots)
        reader.calls = self.calls
        return reader


class WatchedTransfer:
    """A world whose reader and page access write down what they are asked for; so are the events."""

    def __init__(self) -> None:
        fabric, access, buffer = InProcessFabric(), WatchedAccess(), PageBuffer()
        self.calls = access.calls
        pages = replace(buffer.memory, access=access)
        offer = WatchedOffer(fabric, "reader", 1, pages, LEASES)
        offer.calls = self.calls
        self.clock = Clock()
        transfer = Transfer(offer, pages, KV_FORMAT, limits=LIMITS, clock=self.clock)
        self.source = InProcessHolder(fabric, "source", self.clock)
        self.source.write(3, 77)
        self.world = FetchWorld(transfer, buffer, self.clock, lambda: self.source)
        self.transfer = transfer

    def start(self, fetch_id: int) -> None:
        self.transfer.start(fetch_id, self.world.baton(self.source, (5,)), 0, [fetch_id])

    def next_event(self) -> FetchEvent:
        event = self.world.next_event()
        self.calls.append(type(event).__name__)
        return event


@pytest.fixture
def watched() -> WatchedTransfer:
    return WatchedTransfer()


def test_what_has_arrived_is_settled_before_it_is_compared_and_before_it_has_landed(
    watched: WatchedTransfer,
) -> None:
    watched.start(1)
    assert isinstance(watched.next_event(), FetchLanded)
    assert watched.calls == ["settle", "settle", "FetchLanded"], "the known page, and the pages"
    watched.start(2)
    assert isinstance(watched.next_event(), FetchLanded)
    assert watched.calls[3:] == ["settle", "FetchLanded"]


def test_the_device_is_waited_for_between_the_end_of_a_reader_and_the_end_of_its_fetches(
    watched: WatchedTransfer,
) -> None:
    watched.start(1)
    watched.next_event()
    watched.calls.clear()
    watched.source.freeze()
    watched.start(2)
    watched.transfer.abandon(2)
    watched.clock.now += LIMITS.quarantine_seconds
    assert watched.next_event() == FetchEnded(2)
    assert watched.calls == ["close", "fence", "FetchEnded"]


def test_the_end_of_a_transfer_waits_for_the_device(watched: WatchedTransfer) -> None:
    watched.transfer.close()
    assert watched.calls == ["close", "fence"]


def test_fetches_are_counted_by_their_transport(watched: WatchedTransfer) -> None:
    for fetch_id in (1, 2):
        watched.start(fetch_id)
        assert isinstance(watched.next_event(), FetchLanded)
    assert watched.world.pages.holds(1, byte_of(5))
    size = watched.world.pages.memory.page_bytes
    assert watched.transfer.counters.fetches == {"memory": 2}
    assert watched.transfer.counters.fetched_bytes == {"memory": 2 * size}


def test_a_fetch_that_did_not_arrive_is_not_counted(watched: WatchedTransfer) -> None:
    watched.source.kill()
    watched.start(1)
    watched.next_event()
    assert not watched.transfer.counters.fetches


def test_a_told_ranks_thread_takes_the_device_first_and_reports_a_read_when_it_is_settled() -> None:
    fabric, access, buffer = InProcessFabric(), WatchedAccess(), PageBuffer()
    pages = replace(buffer.memory, access=access)
    offer = InProcessOffer(fabric, "reader", 1, pages, LEASES)
    source = InProcessHolder(fabric, "source", Clock())
    reported: list[str] = []

    def report(told: bytes) -> None:
        found = decode_report(told)
        reported.append(type(found).__name__)
        if isinstance(found, ReadEnded):
            assert access.calls[-1] == "settle"
            raise InterruptedError

    service = RankService(pages, lambda _told, _pages: offer, report)
    (part,) = parts_of(offer.holder, source.holder)
    baton = Baton("r", 1, source.holder, KV_FORMAT, 3, 77, 1, 1, ())
    for command in (offer_command(), MakeReader(1), ReadPages(1, 1, baton, PartOfPages.of(part), [5], [2])):
        service.tell(encode(command))
    ended: list[BaseException] = []
    service.run(ended.append)
    assert reported == ["Offered", "ReaderMade", "ReadEnded"]
    assert access.calls[0] == "enter"
    assert [type(each) for each in ended] == [InterruptedError]
    assert buffer.holds(2, byte_of(5))

"""Fetches between workers of unequal ranks, over real NIXL and real TLS: a holder's ranks are processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from shared.transfer.grants import Grants
from shared.transfer.memory import PageMemory
from shared.transfer.offer import Offer
from shared.transfer.protocol import FetchEnded, FetchEvent, FetchFailed, FetchLanded, FetchStale, KvTransport
from shared.transfer.transports import open_offer
from shared.wire.baton import Baton
from tests.fetcher_contract import KV_FORMAT, LEASES, PATIENCE_SECONDS, Clock
from tests.integration.transfer.holder_processes import epochs, network, worker_keys
from tests.integration.transfer.ranked_holders import POOL, RankedProcesses, whole_pages_here
from tests.unit.transfer.cut_pages import Cut
from tests.unit.transfer.ranked_pages import RankedWorker, ranked_worker

HEADS, SLICE_BYTES = 4, 48 * 1024
SOURCES, TARGETS = (2, 3, 9, 4, 17, 60), (7, 8, 1, 12, 22, 63)
RANKS = [(2, 4), (4, 2), (1, 2), (2, 1), (2, 2)]
TRANSPORTS: tuple[KvTransport, ...] = ("nixl", "tls")
WAYS = ("cma", "tcp", "tls")  # by which pages travel: two of NIXL's


def cut_of(ranks: int) -> Cut:
    return Cut(HEADS, ranks, SLICE_BYTES)


class RankedFetches:
    """A reader of d ranks in this process, and a holder of p processes."""

    def __init__(self, p: int, d: int, transport: KvTransport):
        self.clock = Clock()
        identity = ("d", next(epochs))

        def offer(memory: PageMemory, rank: int, lead: Offer | None) -> Offer:
            grants = lead.words if lead and isinstance(lead.words, Grants) else None
            return open_offer(
                network(transport), worker_keys(), identity, memory, LEASES, rank=rank, grants=grants
            )

        self.worker: RankedWorker = ranked_worker(cut_of(d), self.clock, offer, POOL)
        self.transfer = self.worker.transfer
        self.worker.buffer.poison()
        self.source = RankedProcesses(cut_of(p), transport)
        self.source.write(3, 77, range(POOL))
        self.others: list[RankedProcesses] = []
        self.events: list[FetchEvent] = []

    def start(
        self, fetch_id: int, source: RankedProcesses | None = None, pages: tuple[int, ...] = SOURCES
    ) -> None:
        holder = (source or self.source).holder
        baton = Baton("r", 1, holder, KV_FORMAT, 3, 77, 1, 1, pages)
        self.transfer.start(fetch_id, baton, 0, TARGETS if pages == SOURCES else range(len(pages)))

    def poll_until(self, done: Callable[[], bool], ageing_seconds: float = 0.0) -> None:
        """`ageing_seconds` pass with each poll: what other ranks give counts as progress of the fetch."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not done():
            assert time.monotonic() < deadline, f"nothing but {self.events}"
            self.events += self.transfer.poll()
            self.clock.now += ageing_seconds
            os.sched_yield()

    def next_event(self) -> FetchEvent:
        self.poll_until(lambda: bool(self.events))
        return self.events.pop(0)

    def fetch(self, fetch_id: int = 1) -> FetchEvent:
        self.start(fetch_id)
        return self.next_event()

    @property
    def right(self) -> bool:
        """Whether every rank has its slices of the pages, and no other byte has changed."""
        buffer = self.worker.buffer
        return buffer.contents() == buffer.gathered(whole_pages_here(buffer.cut), SOURCES, TARGETS)

    def close(self) -> None:
        self.transfer.close()
        for source in (self.source, *self.others):
            source.kill()


@contextmanager
def fetches(p: int, d: int, transport: KvTransport) -> Iterator[RankedFetches]:
    meeting = RankedFetches(p, d, transport)
    try:
        yield meeting
    finally:
        meeting.close()


@pytest.fixture
def transport(way: str, monkeypatch: pytest.MonkeyPatch) -> KvTransport:
    if way == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    else:
        monkeypatch.delenv("UCX_TLS", raising=False)
    return "tls" if way == "tls" else "nixl"


@pytest.mark.parametrize("way", ["cma", "tls"])
@pytest.mark.parametrize(("p", "d"), RANKS)
def test_pages_of_p_ranks_arrive_at_d_as_a_gather(p: int, d: int, transport: KvTransport) -> None:
    """The first fetch checks the known page of each source; a fetch of an ended lease is stale."""
    with fetches(p, d, transport) as meeting:
        for fetch_id in (1, 2):
            landed = meeting.fetch(fetch_id)
            assert isinstance(landed, FetchLanded), landed
            assert landed.fetched_bytes == len(SOURCES) * HEADS * SLICE_BYTES
            assert meeting.right
            meeting.worker.buffer.poison()
        meeting.source.clear(3)
        assert meeting.fetch(3) == FetchStale(3)


@pytest.mark.parametrize("way", ["tcp", "tls"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_frozen_in_mid_read_holds_up_its_fetch_alone(
    rank: int, transport: KvTransport
) -> None:
    """It answers after all, and the bytes are right; one that stays silent is fenced."""
    with fetches(2, 4, transport) as meeting:
        assert isinstance(meeting.fetch(1), FetchLanded)
        meeting.worker.buffer.poison()
        meeting.source.ranks[rank].freeze()
        meeting.start(2)
        for _ in range(200):
            assert meeting.transfer.poll() == []
            os.sched_yield()
        meeting.source.ranks[rank].thaw()
        assert isinstance(meeting.next_event(), FetchLanded)
        assert meeting.right
        meeting.source.ranks[rank].freeze()
        meeting.start(3)
        meeting.poll_until(lambda: not meeting.transfer.outstanding, ageing_seconds=0.01)
        failed, ended = meeting.events
        assert isinstance(failed, FetchFailed)
        assert not failed.ended
        assert ended == FetchEnded(3)
        assert meeting.transfer.readers_fenced == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_in_mid_read_costs_its_fetch_and_no_other(
    rank: int, way: str, transport: KvTransport
) -> None:
    """Over CMA the kernel has read it all before: a rank that is gone fails the next fetch."""
    with fetches(2, 4, transport) as meeting:
        other = RankedProcesses(cut_of(1), transport)
        meeting.others.append(other)
        other.write(3, 77, range(POOL))
        assert isinstance(meeting.fetch(1), FetchLanded)
        meeting.source.ranks[rank].freeze()
        meeting.start(2, pages=tuple(range(POOL)))
        meeting.events += meeting.transfer.poll()
        assert bool(meeting.events) == (way == "cma")
        meeting.source.ranks[rank].kill()
        meeting.start(3)
        meeting.poll_until(lambda: not meeting.transfer.outstanding, ageing_seconds=0.01)
        first = {event.fetch_id: event for event in reversed(meeting.events)}
        assert isinstance(first[2], FetchLanded if way == "cma" else FetchFailed)
        assert isinstance(first[3], FetchFailed), "nobody takes what is left of it for a worker"
        meeting.events.clear()
        meeting.worker.buffer.poison()
        meeting.start(4, other)
        assert isinstance(meeting.next_event(), FetchLanded)
        assert meeting.right


@pytest.mark.parametrize("way", ["cma", "tls"])
def test_unsound_ranks_are_refused_and_another_fetch_goes_on(transport: KvTransport) -> None:
    """Ranks in each other's place pass the numbers, and have other bytes."""
    with fetches(2, 2, transport) as meeting:
        holder = meeting.source.holder
        swapped = msgspec.structs.replace(
            holder,
            metadata=holder.ranks[0].metadata,
            pages_address=holder.ranks[0].pages_address,
            ranks=(
                msgspec.structs.replace(
                    holder.ranks[0], metadata=holder.metadata, pages_address=holder.pages_address
                ),
            ),
        )
        twice = msgspec.structs.replace(
            holder, ranks=(msgspec.structs.replace(holder.ranks[0], metadata=holder.metadata),)
        )
        for fetch_id, lying in enumerate((swapped, twice), start=10):
            baton = Baton("r", 1, lying, KV_FORMAT, 3, 77, 1, 1, SOURCES)
            meeting.transfer.start(fetch_id, baton, 0, range(30, 30 + len(SOURCES)))
            meeting.clock.now += 0.001
            failed = meeting.next_event()
            assert isinstance(failed, FetchFailed), failed
            assert failed.ended
        meeting.worker.buffer.poison()
        assert isinstance(meeting.fetch(1), FetchLanded)
        assert meeting.right
        assert meeting.transfer.readers_fenced == 0

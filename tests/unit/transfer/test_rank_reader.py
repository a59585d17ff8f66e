"""Fetches between workers of several ranks, over the in-process transfer: real memory, any number on either side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import msgspec
import pytest
from structlog.testing import capture_logs

from shared.transfer.fetches import read_batches
from shared.transfer.protocol import FetchEnded, FetchEvent, FetchFailed, FetchLanded, FetchStale
from shared.transfer.rank_reader import at_rank
from shared.transfer.reader import ReadState, Span
from shared.transfer.slices import parts_of
from shared.transfer.transfer import self_fetch
from shared.wire.baton import Baton, HolderRank, agent_name
from tests.benchmarks.rank_posts import PAGES, holder
from tests.doubles.in_process_transfer import InProcessFabric, InProcessReader
from tests.fetcher_contract import (
    KV_FORMAT,
    LIMITS,
    PAGE_BYTES,
    AnsweredReadsContract,
    Clock,
    FetcherContract,
    FetchWorld,
)
from tests.unit.transfer.cut_pages import whole_pages
from tests.unit.transfer.ranked_pages import (
    HEADS,
    RankedHolder,
    RankedWorker,
    cut_of,
    in_process,
    ranked_worker,
    ranked_world,
)

POOL = 24  # pages of a worker
SOURCES, TARGETS = (2, 3, 9, 4, 17), (7, 8, 1, 12, 22)
PAIRS = [(2, 4), (4, 2), (1, 2), (2, 1), (2, 2), (4, 4), (1, 8), (8, 1), (3, 2), (2, 3), (16, 4), (4, 16)]


class RankedContract(FetcherContract, AnsweredReadsContract):
    """The whole contract, of a reader of two ranks."""


class TestTwoRanksFromOne(RankedContract):
    @pytest.fixture
    def world(self) -> Iterator[FetchWorld]:
        yield from ranked_world(Clock(), 2, 1)


class TestTwoRanksFromTwo(RankedContract):
    @pytest.fixture
    def world(self) -> Iterator[FetchWorld]:
        yield from ranked_world(Clock(), 2, 2)


class TestTwoRanksFromFour(RankedContract):
    @pytest.fixture
    def world(self) -> Iterator[FetchWorld]:
        yield from ranked_world(Clock(), 2, 4)


class Meeting:
    """A holder of p ranks and a reader of d, with pages of random bytes at the one and poison at the other."""

    def __init__(self, p: int, d: int, heads: int = HEADS):
        self.fabric, self.clock = InProcessFabric(), Clock()
        self.spans: list[Span] = []
        self.fabric.copy, copy = self.copy, self.fabric.copy
        self.move = copy
        self.holder = RankedHolder(self.fabric, "p", self.clock, cut_of(p, heads))
        self.reader: RankedWorker = ranked_worker(
            cut_of(d, heads), self.clock, in_process(self.fabric, "d"), POOL
        )
        self.whole = whole_pages(POOL, heads, PAGE_BYTES // heads)
        self.holder.worker.buffer.load(self.whole)
        self.reader.buffer.poison()
        self.holder.write(3, 77)
        self.events: list[FetchEvent] = []

    def copy(self, span: Span) -> None:
        self.spans.append(span)
        self.move(span)

    def start(self, fetch_id: int = 1, baton: Baton | None = None) -> None:
        baton = baton or self.holder.worker.baton(SOURCES)
        self.reader.transfer.start(fetch_id, baton, 0, TARGETS[: len(baton.pages)])

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.events += self.reader.transfer.poll()

    def fetch(self, baton: Baton | None = None) -> FetchEvent:
        self.start(baton=baton)
        for _ in range(1000):
            self.poll()
            if self.events:
                return self.events.pop(0)
        raise AssertionError("no event")

    @property
    def right(self) -> bool:
        """Whether the pages are there, on every rank, and no other byte has changed."""
        buffer = self.reader.buffer
        return buffer.contents() == buffer.gathered(self.whole, SOURCES, TARGETS)

    @property
    def untouched(self) -> bool:
        """Whether nothing of the pages that were asked for is anywhere."""
        return not any(
            self.whole[page, 0].tobytes() in content
            for content in self.reader.buffer.contents()
            for page in SOURCES
        )


@pytest.mark.parametrize(("heads", "pair"), list(product((1, 2, HEADS), PAIRS)))
def test_a_fetch_is_a_gather_of_slices_and_nothing_else_is_written(heads: int, pair: tuple[int, int]) -> None:
    meeting = Meeting(*pair, heads)
    landed = meeting.fetch()
    assert isinstance(landed, FetchLanded)
    assert meeting.right
    ranks = meeting.reader.buffer.ranks
    assert landed.fetched_bytes == len(SOURCES) * sum(buffer.memory.page_bytes for buffer in ranks)


@pytest.mark.parametrize(("p", "d", "sources"), [(2, 4, 4), (4, 2, 4), (1, 2, 2), (2, 1, 2)])
def test_the_spans_of_a_fetch_are_pages_by_sources(p: int, d: int, sources: int) -> None:
    """After the first, which reads the known page of each source as well, and with one word."""
    meeting = Meeting(p, d)
    meeting.fetch()
    assert len(meeting.spans) == (1 + len(SOURCES)) * sources + 1
    meeting.spans.clear()
    meeting.fetch()
    assert len(meeting.spans) == len(SOURCES) * sources + 1


def test_neighbours_of_equal_ranks_are_one_span() -> None:
    meeting = Meeting(2, 2)
    meeting.fetch()
    meeting.spans.clear()
    meeting.fetch()
    assert len(meeting.spans) == 2 * 4 + 1, "pages 2 and 3 lie side by side at both"


def test_a_word_is_read_when_the_reads_of_all_ranks_have_ended() -> None:
    """One rank's last page is late; the lease ends, the pages are filled anew, and only then does it answer."""
    meeting = Meeting(4, 2)
    meeting.fetch()
    meeting.reader.buffer.poison()
    meeting.fabric.freeze(meeting.holder.agents[2])
    meeting.start(2)
    meeting.poll(50)
    assert meeting.events == [], "three of four sources have given all"
    meeting.holder.clear(3)
    meeting.holder.worker.buffer.poison()
    meeting.fabric.thaw(meeting.holder.agents[2])
    meeting.poll(50)
    assert meeting.events == [FetchStale(2)]


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_of_the_holder_that_is_killed_in_mid_read_fails_the_fetch_and_no_other(rank: int) -> None:
    meeting = Meeting(4, 2)
    meeting.fetch()
    other = RankedHolder(meeting.fabric, "q", meeting.clock, cut_of(2))
    other.worker.buffer.load(meeting.whole)
    other.write(3, 77)
    meeting.start(2)
    meeting.poll()
    meeting.fabric.kill(meeting.holder.agents[rank])
    meeting.start(3, other.worker.baton(SOURCES))
    meeting.poll(100)
    assert [type(event) for event in meeting.events if event.fetch_id == 2] == [FetchFailed, FetchEnded]
    assert [type(event) for event in meeting.events if event.fetch_id == 3] == [FetchLanded]
    assert meeting.reader.transfer.readers_fenced == 1
    assert meeting.reader.transfer.outstanding == 0


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_of_the_holder_that_freezes_in_mid_read_times_out_and_is_fenced(rank: int) -> None:
    meeting = Meeting(4, 2)
    meeting.fetch()
    meeting.fabric.freeze(meeting.holder.agents[rank])
    meeting.start(2)
    meeting.poll(50)
    meeting.clock.now += LIMITS.fetch_seconds_max
    meeting.poll()
    assert [(type(event), event.fetch_id) for event in meeting.events] == [(FetchFailed, 2)]
    meeting.clock.now += LIMITS.quarantine_seconds
    meeting.poll(3)
    assert meeting.events[1:] == [FetchEnded(2)]
    assert meeting.reader.transfer.readers_fenced == 1


def test_a_fetch_goes_on_when_the_frozen_rank_answers_again() -> None:
    meeting = Meeting(2, 4)
    meeting.fabric.freeze(meeting.holder.agents[1])
    meeting.start()
    meeting.poll(20)
    meeting.fabric.thaw(meeting.holder.agents[1])
    meeting.poll(50)
    assert isinstance(meeting.events[0], FetchLanded)
    assert meeting.right


@pytest.mark.parametrize("rank", range(4))
def test_each_rank_of_a_peer_is_checked_by_its_own_slices_of_the_known_page(rank: int) -> None:
    """Whole ones of another rank are other bytes."""
    meeting = Meeting(4, 2)
    known = meeting.holder.holder.known_page
    memory = meeting.holder.worker.buffer.ranks[rank].memory
    other = meeting.holder.worker.buffer.ranks[(rank + 1) % 4].memory
    content = memory.access.buffer(memory.page_bytes)
    memory.access.read(other.address_of(known), content)
    memory.access.write(memory.address_of(known), content)
    with capture_logs() as lines:
        failed = meeting.fetch()
    assert isinstance(failed, FetchFailed)
    assert failed.ended
    assert "other bytes" in failed.reason
    assert [line["event"] for line in lines] == ["transfer.wrong_bytes"]
    assert meeting.untouched


def test_a_peer_with_other_ranks_than_those_that_were_checked_is_another_peer() -> None:
    meeting = Meeting(4, 2)
    assert isinstance(meeting.fetch(), FetchLanded)
    holder = meeting.holder.holder
    swapped = msgspec.structs.replace(
        holder.ranks[0], pages_address=holder.ranks[1].pages_address, metadata=b"elsewhere"
    )
    other = msgspec.structs.replace(holder, ranks=(swapped, *holder.ranks[1:]))
    failed = meeting.fetch(msgspec.structs.replace(meeting.holder.worker.baton(SOURCES), holder=other))
    assert isinstance(failed, FetchFailed)
    assert "other bytes" in failed.reason


def test_a_rank_that_refuses_a_read_ends_the_fetch_when_the_others_have_ended() -> None:
    meeting = Meeting(4, 2)
    meeting.fetch()
    meeting.fabric.kill(meeting.holder.agents[1])
    meeting.start(2)
    meeting.poll(50)
    failed, ended = meeting.events
    assert isinstance(failed, FetchFailed)
    assert "it is gone" in failed.reason
    assert ended == FetchEnded(2)
    assert meeting.reader.transfer.readers_fenced == 0, "what was posted has ended by itself"


def test_a_reader_of_several_ranks_fetches_from_itself() -> None:
    for ranks in (1, 2, 4):
        worker = ranked_worker(cut_of(ranks), Clock(), in_process(InProcessFabric(), "d"), POOL)
        memory = worker.buffer.ranks[0].memory
        assert self_fetch(worker.transfer, memory, KV_FORMAT) == "memory"


class LeavingOutReader(InProcessReader):
    """Reads over a transport that asks; one rank of the holder finds the lease ended, and gives no bytes."""

    def read_pages(self, baton: Baton, spans: Sequence[Span]) -> int:
        handle = super().read_pages(baton, spans)
        self.gone = {*getattr(self, "gone", ()), *([handle] if baton.holder.agent.endswith(".1") else [])}
        return handle

    def state(self, handle: int) -> ReadState:
        if handle in getattr(self, "gone", ()):
            self._reads[handle].state = ReadState.DONE
            return ReadState.GONE
        return super().state(handle)


def test_a_word_that_holds_proves_nothing_where_a_rank_left_out_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that learns of a lease later than rank 0, or that of its end earlier."""
    meeting = Meeting(2, 2)
    meeting.fetch()
    for offer in meeting.reader.offers:
        monkeypatch.setattr(offer, "make_reader", lambda slots: LeavingOutReader(meeting.fabric, slots))
    meeting.reader.transfer._fetches._reader = meeting.reader.transfer._make_reader()
    assert meeting.fetch() == FetchStale(1)


def test_a_known_page_that_a_rank_leaves_out_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else such a peer would count as checked."""
    meeting = Meeting(2, 2)
    with monkeypatch.context() as patch:
        for offer in meeting.reader.offers:
            patch.setattr(offer, "make_reader", lambda slots: LeavingOutReader(meeting.fabric, slots))
        meeting.reader.transfer._fetches._reader = meeting.reader.transfer._make_reader()
    failed = meeting.fetch()
    assert isinstance(failed, FetchFailed)
    assert "other bytes" in failed.reason
    assert meeting.reader.transfer.outstanding == 0


# ---- what holders say of themselves ---------------------------------------------------------------------------------


RANK = HolderRank("p", b"", 0, 4, 4)


@pytest.mark.parametrize(
    "ranks",
    [
        (),
        (msgspec.structs.replace(RANK, agent=agent_name("p", 5)),),
        (msgspec.structs.replace(RANK, agent=agent_name("p", 5) + ".1", slices=5),),
        (msgspec.structs.replace(RANK, agent=agent_name("p", 5) + ".1", first_slice=1 << 47),),
        (msgspec.structs.replace(RANK, agent=agent_name("p", 5) + ".1"),) * 16,
    ],
)
def test_a_holder_with_unsound_ranks_costs_its_fetch_and_nothing_else(ranks: tuple[HolderRank, ...]) -> None:
    meeting = Meeting(2, 2)
    meeting.start(2)
    lying = msgspec.structs.replace(meeting.holder.holder, ranks=ranks)
    meeting.reader.transfer.start(
        3, msgspec.structs.replace(meeting.holder.worker.baton(SOURCES), holder=lying), 0, TARGETS
    )
    meeting.poll(50)
    by_fetch = {event.fetch_id: event for event in meeting.events}
    refused = by_fetch[3]
    assert isinstance(refused, FetchFailed)
    assert refused.ended
    assert refused.reason.startswith(lying.name)
    assert isinstance(by_fetch[2], FetchLanded)
    assert meeting.right
    assert meeting.reader.transfer.readers_fenced == 0


def test_a_rank_alone_has_no_words_and_no_other_ranks() -> None:
    meeting = Meeting(4, 2)
    baton = meeting.holder.worker.baton(SOURCES)
    for rank in range(4):
        alone = at_rank(baton, rank).holder
        assert alone.agent == meeting.holder.agents[rank]
        assert alone.has_agent_of_a_rank
        assert alone.ranks == ()
        assert bool(alone.words_address) == (rank == 0)
    assert not msgspec.structs.replace(baton.holder, agent="q-1.1").has_agent_of_a_rank


def test_a_long_fetch_is_told_in_a_few_commands_and_read_page_by_page() -> None:
    """4,096 tokens of Llama-70B's shape at eight ranks: each command costs the loop some 50 µs."""
    worker = holder("d", 8)
    batches = read_batches(parts_of(worker, holder("p", 2)), range(PAGES), range(PAGES), LIMITS)
    told = [batch for batch in batches if batch.part.rank]
    assert len(told) == 7
    for rank in range(8):
        read = [page for batch in reversed(batches) if batch.part.rank == rank for page in batch.sources]
        assert read == list(range(PAGES))
    assert [batch.part.rank for batch in batches[-7:]] == [1, 2, 3, 4, 5, 6, 7], "they are posted first"

"""The contract of fetching, on the in-process transfer; and the table of a fetch's states."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import msgspec
import pytest

from shared.primitives.errors import InvariantError, TransferError
from shared.transfer import fetches
from shared.transfer.counters import KvCounters
from shared.transfer.fetches import FETCH_STATES, RETIRE_AGAIN_SECONDS, Fetches, FetchState, ReadEvent
from shared.transfer.memory import WordTable
from shared.transfer.protocol import FetchEnded, FetchFailed, FetchLanded
from shared.transfer.rank_reader import RankReader, WorkerReader, make_on_thread
from shared.transfer.reader import NotPostedError, ReadState, Span
from shared.transfer.transfer import Transfer, self_fetch
from shared.wire.baton import Baton, HolderRank
from tests.doubles.in_process_transfer import InProcessFabric, InProcessReader
from tests.fetcher_contract import (
    KV_FORMAT,
    LIMITS,
    PAGE_SIZES,
    PATIENCE_SECONDS,
    AnsweredReadsContract,
    Clock,
    FetcherContract,
    FetchWorld,
    HolderUnderTest,
    byte_of,
)
from tests.unit.transfer.in_process_world import InProcessHolder, make_world
from tests.waiting import until


@pytest.fixture
def world() -> Iterator[FetchWorld]:
    yield from make_world(Clock())


class TestInProcess(FetcherContract, AnsweredReadsContract):
    """Both contracts: a frozen worker answers no read here."""

    @pytest.fixture(params=PAGE_SIZES)
    def world(self, request: pytest.FixtureRequest) -> Iterator[FetchWorld]:
        yield from make_world(Clock(), request.param)


@dataclass
class TickingClock(Clock):
    """Every look at it takes time, as posting does where the transport copies within the post."""

    def __call__(self) -> float:
        self.now += 0.005
        return self.now


@pytest.fixture
def busy_world() -> Iterator[FetchWorld]:
    """One in which a turn has time to post a single batch."""
    yield from make_world(TickingClock())


SIX_BATCHES = tuple(range(0, 24, 2))  # pages of a holder; two make a batch, of two spans


def start(
    world: FetchWorld, fetch_id: int, source: HolderUnderTest, at: int, pages: Sequence[int] = SIX_BATCHES
) -> None:
    """Fetch the pages into those from `at` on."""
    world.reader.start(fetch_id, world.baton(source, tuple(pages)), 0, range(at, at + len(pages)))


def make_source(world: FetchWorld) -> HolderUnderTest:
    """A holder whose known page was compared by an earlier fetch."""
    source = world.make_holder()
    source.write(3, 77)
    start(world, 0, source, 400, (5,))
    assert isinstance(world.next_event(), FetchLanded)
    assert world.reader.poll() == [], "a new turn, with time to post"
    return source


def arrived(world: FetchWorld, at: int, pages: Sequence[int] = SIX_BATCHES) -> list[bool]:
    return [world.pages.holds(at + place, byte_of(page)) for place, page in enumerate(pages)]


def polls_until_landed(world: FetchWorld) -> int:
    start(world, 1, make_source(world), 0)
    for polls in count(1):
        match world.reader.poll():
            case [FetchLanded(fetched_bytes=size)]:
                assert size == 12 * world.pages.memory.page_bytes
                assert all(arrived(world, 0))
                return polls
            case []:
                continue
            case others:
                raise AssertionError(others)
    raise AssertionError


def test_a_turn_that_has_spent_its_time_leaves_batches_to_the_next(
    world: FetchWorld, busy_world: FetchWorld
) -> None:
    """Where posting costs nothing all six are under way at once, two polls long; the word is there at once."""
    assert polls_until_landed(world) == 2
    assert polls_until_landed(busy_world) >= 6


def test_no_read_has_more_spans_than_a_holder_answers(
    world: FetchWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    read_pages = InProcessReader.read_pages

    def read_and_count(reader: InProcessReader, baton: Baton, spans: Sequence[Span]) -> int:
        asked.append(len(spans))
        return read_pages(reader, baton, spans)

    monkeypatch.setattr(InProcessReader, "read_pages", read_and_count)
    monkeypatch.setattr(fetches, "SPANS_MAX", 1)
    start(world, 1, make_source(world), 0)
    assert isinstance(world.next_event(), FetchLanded)
    assert asked[-len(SIX_BATCHES) :] == [1] * len(SIX_BATCHES)


def test_a_fetch_abandoned_before_its_first_batch_reads_nothing(busy_world: FetchWorld) -> None:
    source = make_source(busy_world)
    start(busy_world, 1, source, 0)
    start(busy_world, 2, source, 100)
    busy_world.reader.abandon(2)
    assert busy_world.next_event() == FetchEnded(2)
    assert isinstance(busy_world.next_event(), FetchLanded)
    assert all(arrived(busy_world, 0))
    assert not any(arrived(busy_world, 100))


def test_a_fetch_abandoned_between_batches_ends_when_those_posted_are_done(busy_world: FetchWorld) -> None:
    start(busy_world, 1, make_source(busy_world), 0)
    busy_world.reader.abandon(1)
    assert busy_world.next_event() == FetchEnded(1)
    assert arrived(busy_world, 0) == [True] * 2 + [False] * 10
    assert busy_world.reader.outstanding == 0
    assert busy_world.reader.poll() == []


def test_a_fetch_that_timed_out_asks_for_no_more_batches(busy_world: FetchWorld) -> None:
    source = make_source(busy_world)
    source.freeze()
    start(busy_world, 1, source, 0)
    busy_world.clock.now += LIMITS.fetch_seconds_max
    [failed] = busy_world.reader.poll()
    assert isinstance(failed, FetchFailed)
    assert not failed.ended
    assert "timed out" in failed.reason
    source.thaw()
    assert busy_world.next_event() == FetchEnded(1)
    assert arrived(busy_world, 0) == [True] * 2 + [False] * 10


def test_a_fetch_ages_by_the_silence_of_its_peer_not_by_its_size(busy_world: FetchWorld) -> None:
    """The loop is so slow that the second fetch gets its first batch after the time of a fetch is over."""
    source = make_source(busy_world)
    start(busy_world, 1, source, 0)
    start(busy_world, 2, source, 100)
    landed: list[int] = []
    while busy_world.reader.outstanding:
        busy_world.clock.now += 0.6 * LIMITS.fetch_seconds_max
        for event in busy_world.reader.poll():
            assert isinstance(event, FetchLanded), event
            assert event.seconds > 3 * LIMITS.fetch_seconds_max
            landed.append(event.fetch_id)
    assert landed == [1, 2]
    assert all(arrived(busy_world, 0) + arrived(busy_world, 100))


def test_no_fetch_waits_for_the_whole_of_a_longer_one(busy_world: FetchWorld) -> None:
    source = make_source(busy_world)
    start(busy_world, 1, source, 0)
    start(busy_world, 2, source, 100, SIX_BATCHES[:4])
    busy_world.poll_until(lambda: len(busy_world.events) == 2)
    assert [event.fetch_id for event in busy_world.events if isinstance(event, FetchLanded)] == [2, 1]


def retire_the_reader(world: FetchWorld) -> HolderUnderTest:
    """Fetch 1 is given up for too long, and fetch 2 of the same reader has batches left to post."""
    frozen, slow = make_source(world), make_source(world)
    frozen.freeze()
    start(world, 1, frozen, 100)
    world.clock.now += LIMITS.fetch_seconds_max
    assert isinstance(world.next_event(), FetchFailed)
    start(world, 2, slow, 0)
    world.clock.now += LIMITS.quarantine_seconds
    assert world.reader.poll() == []
    assert not any(arrived(world, 4, SIX_BATCHES[2:]))
    return slow


def test_the_fence_waits_for_the_batches_of_a_healthy_fetch(busy_world: FetchWorld) -> None:
    slow = retire_the_reader(busy_world)
    assert isinstance(busy_world.next_event(), FetchLanded)
    assert all(arrived(busy_world, 0))
    assert busy_world.next_event() == FetchEnded(1)
    assert busy_world.reader.readers_fenced == 1
    start(busy_world, 3, slow, 100)
    assert isinstance(busy_world.next_event(), FetchLanded)


def test_a_fetch_that_times_out_between_batches_goes_with_the_fenced_reader(busy_world: FetchWorld) -> None:
    retire_the_reader(busy_world).freeze()
    busy_world.reader.poll()
    busy_world.clock.now += LIMITS.fetch_seconds_max
    busy_world.poll_until(lambda: busy_world.reader.outstanding == 0)
    failed, *ended = busy_world.events
    assert isinstance(failed, FetchFailed)
    assert failed.fetch_id == 2
    assert ended == [FetchEnded(1), FetchEnded(2)]
    assert busy_world.reader.readers_fenced == 1


@pytest.mark.parametrize("of_more", [{"slices": 4}, {"ranks": (HolderRank("h-1", b"", 0, 4, 4),)}])
def test_pages_on_several_gpus_are_refused_where_pages_are_whole(
    world: FetchWorld, of_more: dict[str, Any]
) -> None:
    source = make_source(world)
    baton = world.baton(source, (5,))
    split = msgspec.structs.replace(source.holder, **of_more)
    world.reader.start(1, msgspec.structs.replace(baton, holder=split), 0, [0])
    [failed] = world.reader.poll()
    assert isinstance(failed, FetchFailed)
    assert failed.ended
    assert "GPUs" in failed.reason
    assert world.pages.holds(0, 0)


class FailingReader(InProcessReader):
    """Its second post goes wrong in one of the ways that NIXL knows: refused, or broken when parts were posted."""

    def __init__(self, *, refuses: bool):
        self.source = InProcessHolder(InProcessFabric(), "source", Clock())
        super().__init__(self.source.fabric, LIMITS.fetches_max)
        self.refuses = refuses
        self.asked = 0
        self.broken: set[int] = set()

    def read_pages(self, baton: Baton, spans: Sequence[Span]) -> int:
        self.asked += 1
        if self.asked == 2 and self.refuses:
            raise NotPostedError("the second post was refused")
        handle = super().read_pages(baton, spans)
        if self.asked == 2:
            self.broken.add(handle)
        return handle

    def state(self, handle: int) -> ReadState:
        return ReadState.FAILED if handle in self.broken else super().state(handle)


class ReaderWithoutWords(InProcessReader):
    """Reads pages, and refuses to read a lease word."""

    def __init__(self) -> None:
        self.source = InProcessHolder(InProcessFabric(), "source", Clock())
        super().__init__(self.source.fabric, LIMITS.fetches_max)

    def read_word(self, _baton: Baton, _slot: int) -> int:
        raise NotPostedError("words are not read today")


def reading(reader: InProcessReader, world: FetchWorld) -> WorkerReader:
    """All that reads into the pages of the world."""
    return WorkerReader(RankReader(reader, world.pages.memory))


def fetch_with(reader: FailingReader | ReaderWithoutWords, world: FetchWorld) -> Fetches:
    """Six batches under way."""
    assert isinstance(world.reader, Transfer)
    memory = world.pages.memory
    own, counters = world.reader.holder, KvCounters()
    fetches = Fetches(own, memory, KV_FORMAT, lambda: reading(reader, world), LIMITS, world.clock, counters)
    fetches.kv_links.note_check(reader.source.holder, "memory", right_bytes=True)
    fetches.start(1, world.baton(reader.source, SIX_BATCHES), 0, range(12))
    return fetches


def test_a_batch_that_is_refused_ends_the_fetch_when_those_before_it_are_done(world: FetchWorld) -> None:
    reader = FailingReader(refuses=True)
    fetches = fetch_with(reader, world)
    assert fetches.poll() == [FetchFailed(1, "the second post was refused", ended=False), FetchEnded(1)]
    assert arrived(world, 0) == [True] * 2 + [False] * 10
    assert (reader.asked, fetches.readers_fenced) == (2, 0)


def test_a_word_that_is_refused_ends_the_fetch_once(world: FetchWorld) -> None:
    reader = ReaderWithoutWords()
    fetches = fetch_with(reader, world)
    events = [*fetches.poll(), *fetches.poll(), *fetches.poll()]
    assert events == [FetchFailed(1, "words are not read today", ended=True)]
    for fetch_id in range(2, 3 + LIMITS.fetches_max):
        fetches.start(fetch_id, world.baton(reader.source, SIX_BATCHES), 0, range(12))
    assert fetches.outstanding == LIMITS.fetches_max, "its slot is back, and only once"


def test_a_batch_that_is_refused_with_none_under_way_ends_the_fetch_at_once(world: FetchWorld) -> None:
    reader = FailingReader(refuses=True)
    world.clock = TickingClock()
    fetches = fetch_with(reader, world)
    assert fetches.poll() == [FetchFailed(1, "the second post was refused", ended=True)]
    assert fetches.outstanding == 0


def test_a_peer_whose_post_broke_is_asked_for_no_more_batches(world: FetchWorld) -> None:
    reader = FailingReader(refuses=False)
    fetches = fetch_with(reader, world)
    assert reader.asked == 2
    failed, ended = fetches.poll()
    assert isinstance(failed, FetchFailed)
    assert not failed.ended
    assert ended == FetchEnded(1)
    assert (reader.asked, fetches.readers_fenced) == (2, 1)


def test_a_fence_that_gets_no_new_reader_is_tried_again_and_nothing_else_stops(world: FetchWorld) -> None:
    """All KV ports are taken, say, and then some are free again."""
    broken, fresh = FailingReader(refuses=False), InProcessReader(InProcessFabric(), LIMITS.fetches_max)
    made: list[InProcessReader | None] = [broken, None, fresh]

    def make_reader() -> WorkerReader:
        reader = made.pop(0)
        if reader is None:
            raise TransferError("no port is free")
        return reading(reader, world)

    own, memory = world.reader.holder, world.pages.memory
    fetches = Fetches(own, memory, KV_FORMAT, make_reader, LIMITS, world.clock, KvCounters())
    fetches.start(1, world.baton(broken.source, SIX_BATCHES), 0, range(12))
    for _ in range(3):
        assert not any(isinstance(event, FetchEnded) for event in fetches.poll()), (
            "its pages are not safe yet"
        )
    assert (fetches.outstanding, fetches.readers_fenced, len(made)) == (1, 0, 1)
    world.clock.now += RETIRE_AGAIN_SECONDS
    assert fetches.poll() == [FetchEnded(1)]
    assert (fetches.outstanding, fetches.readers_fenced) == (0, 1)


def test_a_reader_that_takes_long_to_make_is_made_while_the_loop_goes_on(world: FetchWorld) -> None:
    """To register VRAM may take seconds; streams do not wait for it, and pages stay quarantined."""
    broken, fresh = FailingReader(refuses=False), InProcessReader(InProcessFabric(), LIMITS.fetches_max)
    registered, makers = threading.Event(), [threading.current_thread()]

    def make_reader() -> WorkerReader:
        if len(makers) == 1:
            makers.append(makers[0])
            return reading(broken, world)
        makers.append(threading.current_thread())
        assert registered.wait(PATIENCE_SECONDS)
        return reading(fresh, world)

    own, memory = world.reader.holder, world.pages.memory
    begin = partial(make_on_thread, memory)
    fetches = Fetches(own, memory, KV_FORMAT, make_reader, LIMITS, world.clock, KvCounters(), begin)
    fetches.start(1, world.baton(broken.source, SIX_BATCHES), 0, range(12))
    for _ in range(3):
        assert not any(isinstance(event, FetchEnded) for event in fetches.poll())
    registered.set()
    until(lambda: fetches.poll() == [FetchEnded(1)], PATIENCE_SECONDS, "the fence")
    assert len(makers) == 3, "one successor is made"
    assert makers[2] is not makers[0]
    fetches.close()


def test_the_self_fetch_passes_and_leaves_no_lease(world: FetchWorld) -> None:
    assert isinstance(world.reader, Transfer)
    assert self_fetch(world.reader, world.pages.memory, KV_FORMAT, clock=world.clock) == "memory"
    assert world.reader.kv_links.links == {}, "a worker is no peer of itself"
    assert world.reader.words.read(0) == 0
    assert world.reader.poll() == []


def test_a_self_fetch_that_cannot_land_is_an_error_in_one_sentence(world: FetchWorld) -> None:
    assert isinstance(world.reader, Transfer)
    with pytest.raises(TransferError, match="self-fetch of a KV page ended with FetchFailed"):
        self_fetch(world.reader, world.pages.memory, "another format", clock=world.clock)


def test_a_lease_word_in_use_is_never_given_to_another_lease() -> None:
    words = WordTable(2)
    words.write(1, 5)
    with pytest.raises(AssertionError, match="in use"):
        words.write(1, 6)


@pytest.mark.parametrize("state", FetchState)
@pytest.mark.parametrize("event", ReadEvent)
def test_every_pair_of_state_and_event_is_in_the_table_or_raises(state: FetchState, event: ReadEvent) -> None:
    if event in FETCH_STATES.rows[state]:
        assert FETCH_STATES.next(state, event) is FETCH_STATES.rows[state][event]
    else:
        with pytest.raises(InvariantError, match=f"a {state.value} fetch cannot meet {event.value}"):
            FETCH_STATES.next(state, event)


def test_only_a_done_read_or_the_fence_ends_a_fetch_that_was_given_up() -> None:
    ways = {
        event for event, state in FETCH_STATES.rows[FetchState.GIVEN_UP].items() if state is FetchState.ENDED
    }
    assert ways == {ReadEvent.READ_DONE, ReadEvent.FENCED}

"""What every `Fetcher` must do, as tests: `tests/unit` and `tests/integration` run this class on each of them.

A subclass gives a `world`: a reader in this process and holders that it reads from, wherever those live. Time is a
number the test sets, so that no test waits for a timeout; waiting for bytes is polling, bounded in real time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from shared.transfer.fetches import FetchLimits
from shared.transfer.memory import WHOLE_PAGES, PageMemory, PageSlices
from shared.transfer.protocol import (
    FetchEnded,
    Fetcher,
    FetchEvent,
    FetchFailed,
    FetchLanded,
    FetchStale,
)
from shared.wire.baton import Baton, Holder

PAGES = 512
LEASES = 8
# Bytes a page, by the type of keys and values.
PAGE_SIZES = {"float8_e4m3fn": 32 * 1024, "bfloat16": 64 * 1024}


def kv_format_of(dtype: str) -> str:
    """What `kv_cache.kv_format` says of such pages; that module loads torch, which takes seconds."""
    return f"page-major-1,page_size=16,layers=4,kv_heads=2,head_dim=128,{dtype}"


# All tests of transfer move pages of 8 bits; the contract moves pages of 16 as well.
PAGE_BYTES, KV_FORMAT = PAGE_SIZES["float8_e4m3fn"], kv_format_of("float8_e4m3fn")
LIMITS = FetchLimits(
    fetches_max=16, fetch_seconds_max=10.0, quarantine_seconds=5.0, read_batch_bytes=2 * PAGE_BYTES
)
PATIENCE_SECONDS = 30.0


@dataclass
class Clock:
    """A clock that stands still until the test moves it."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class PageBuffer:
    """Real page memory, a byte for each page to recognize it by, and a known page behind them."""

    def __init__(self, pages: int = PAGES, page_bytes: int = PAGE_BYTES, slices: PageSlices = WHOLE_PAGES):
        self.map = mmap.mmap(-1, (pages + 1) * page_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.memory = PageMemory(address, page_bytes, pages, known_pages=1, slices=slices)

    def fill(self, page: int, byte: int) -> None:
        size = self.memory.page_bytes
        self.map[page * size : (page + 1) * size] = bytes([byte]) * size

    def holds(self, page: int, byte: int) -> bool:
        size = self.memory.page_bytes
        return self.map[page * size : (page + 1) * size] == bytes([byte]) * size

    def stamp(self, page: int, nonce: int, number: int) -> None:
        """Fill a page with what nothing else is filled with: page `number` of what was leased with this nonce."""
        size = self.memory.page_bytes
        self.map[page * size : (page + 1) * size] = _stamp(nonce, number, size)

    def stamped(self, page: int, nonce: int, number: int) -> bool:
        """Whether each byte of a page is that of `stamp`."""
        size = self.memory.page_bytes
        return self.map[page * size : (page + 1) * size] == _stamp(nonce, number, size)


def _stamp(nonce: int, number: int, size: int) -> bytes:
    return ((nonce + number) % 2**64).to_bytes(8, "little") * (size // 8)


class TransferUnderTest(Fetcher, Protocol):
    @property
    def outstanding(self) -> int: ...

    @property
    def readers_fenced(self) -> int: ...


class HolderUnderTest(Protocol):
    """A worker that offers pages. Page i of it is filled with the byte i % 251 + 1.

    `write` opens a lease on all of its pages.
    """

    @property
    def holder(self) -> Holder: ...
    def write(self, lease: int, nonce: int) -> None: ...
    def clear(self, lease: int) -> None: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...
    def kill(self) -> None: ...


@dataclass
class FetchWorld:
    """A reader, and as many holders as the test asks for."""

    reader: TransferUnderTest
    pages: PageBuffer
    clock: Clock
    make_holder: Callable[[], HolderUnderTest]
    kv_format: str = KV_FORMAT
    events: list[FetchEvent] = field(default_factory=list)

    def baton(
        self, source: HolderUnderTest, pages: tuple[int, ...], lease: int = 3, nonce: int = 77
    ) -> Baton:
        return Baton("a request", 2, source.holder, self.kv_format, lease, nonce, 1, 1, pages)

    def poll_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not done():
            assert time.monotonic() < deadline, f"nothing but {self.events}"
            self.events += self.reader.poll()
            os.sched_yield()

    def next_event(self) -> FetchEvent:
        self.poll_until(lambda: bool(self.events))
        return self.events.pop(0)


def byte_of(page: int) -> int:
    return page % 251 + 1


class FetcherContract:
    """The claims; `world` is a fixture of the subclass."""

    def test_pages_land_where_they_were_wanted_and_nowhere_else(self, world: FetchWorld) -> None:
        source = world.make_holder()
        source.write(3, 77)
        world.reader.start(1, world.baton(source, (5, 6, 9, 2)), 0, [10, 11, 12, 13])
        landed = world.next_event()
        assert isinstance(landed, FetchLanded)
        assert (landed.fetch_id, landed.fetched_bytes) == (1, 4 * world.pages.memory.page_bytes)
        for target, page in zip((10, 11, 12, 13), (5, 6, 9, 2), strict=True):
            assert world.pages.holds(target, byte_of(page))
        assert world.pages.holds(9, 0)
        assert world.pages.holds(14, 0)
        assert world.reader.outstanding == 0

    def test_only_the_pages_from_the_start_page_on_are_fetched(self, world: FetchWorld) -> None:
        source = world.make_holder()
        source.write(3, 77)
        world.reader.start(1, world.baton(source, (5, 6, 7)), 1, [20, 21])
        assert isinstance(world.next_event(), FetchLanded)
        assert world.pages.holds(20, byte_of(6))
        assert world.pages.holds(21, byte_of(7))

    def test_a_fetch_of_no_pages_reads_the_lease_word_alone(self, world: FetchWorld) -> None:
        source = world.make_holder()
        source.write(3, 77)
        world.reader.start(1, world.baton(source, (5, 6)), 2, [])
        landed = world.next_event()
        assert isinstance(landed, FetchLanded)
        assert landed.fetched_bytes == 0

    def test_a_baton_whose_lease_never_was_is_stale(self, world: FetchWorld) -> None:
        source = world.make_holder()
        world.reader.start(1, world.baton(source, (5,)), 0, [0])
        assert world.next_event() == FetchStale(1)

    def test_a_lease_that_ends_after_the_pages_were_asked_for_makes_them_stale(
        self, world: FetchWorld
    ) -> None:
        source = world.make_holder()
        source.write(3, 77)
        world.reader.start(1, world.baton(source, (5, 7, 9)), 0, [0, 1, 2])
        source.clear(3)
        assert world.next_event() == FetchStale(1)

    def test_a_word_that_serves_another_lease_now_proves_nothing(self, world: FetchWorld) -> None:
        source = world.make_holder()
        source.write(3, 77)
        source.clear(3)
        source.write(3, 78)
        world.reader.start(1, world.baton(source, (5,)), 0, [0])
        assert world.next_event() == FetchStale(1)

    def test_pages_of_another_type_are_refused_before_anything_is_read(self, world: FetchWorld) -> None:
        """Also where a page has as many bytes, which a type and a number of tokens make together."""
        source = world.make_holder()
        source.write(3, 77)
        others = {kv_format_of(dtype) for dtype in (*PAGE_SIZES, "float32")} - {world.kv_format}
        assert len(others) == len(PAGE_SIZES)
        for other in others:
            baton = msgspec.structs.replace(world.baton(source, (5,)), kv_format=other)
            world.reader.start(1, baton, 0, [0])
            formats = f"KV format '{other}' of {source.holder.name} is not this worker's '{world.kv_format}'"
            self.expect_refusal(world, formats)

    def test_pages_that_the_baton_does_not_name_are_refused(self, world: FetchWorld) -> None:
        source = world.make_holder()
        world.reader.start(1, world.baton(source, (5, 6)), 1, [0, 1])
        self.expect_refusal(world, "baton")

    def test_more_fetches_than_the_bound_are_refused(self, world: FetchWorld) -> None:
        source = world.make_holder()
        source.write(3, 77)
        for fetch_id in range(LIMITS.fetches_max + 1):
            world.reader.start(fetch_id, world.baton(source, (5,)), 0, [fetch_id])
        failed = [event for event in world.reader.poll() if isinstance(event, FetchFailed)]
        assert [(event.fetch_id, event.ended) for event in failed] == [(LIMITS.fetches_max, True)]
        assert "16 fetches" in failed[0].reason
        # over TCP a reader that closes in the middle of reads may end the holder
        world.poll_until(lambda: not world.reader.outstanding)

    def test_an_abandoned_fetch_tells_nothing_but_its_end(self, world: FetchWorld) -> None:
        source = world.make_holder()
        source.write(3, 77)
        world.reader.start(1, world.baton(source, tuple(range(0, 400, 2))), 0, list(range(200)))
        world.reader.abandon(1)
        assert world.next_event() == FetchEnded(1)
        assert world.reader.outstanding == 0
        assert world.reader.poll() == []

    def test_an_abandoned_read_keeps_nobody_else_from_its_holder(self, world: FetchWorld) -> None:
        source = world.make_holder()
        source.write(3, 77)
        world.reader.start(1, world.baton(source, tuple(range(0, 400, 2))), 0, list(range(200)))
        world.reader.abandon(1)
        world.reader.start(2, world.baton(source, (5,)), 0, [300])
        world.poll_until(lambda: len(world.events) == 2)
        assert FetchEnded(1) in world.events
        assert [event.fetch_id for event in world.events if isinstance(event, FetchLanded)] == [2]

    def test_a_fetch_that_failed_at_once_and_was_abandoned_tells_only_its_end(
        self, world: FetchWorld
    ) -> None:
        source = world.make_holder()
        world.reader.start(1, world.baton(source, (5,)), 7, [0])
        world.reader.abandon(1)
        assert world.reader.poll() == [FetchEnded(1)]

    def test_two_holders_are_read_at_the_same_time(self, world: FetchWorld) -> None:
        first, second = world.make_holder(), world.make_holder()
        first.write(0, 11)
        second.write(0, 22)
        world.reader.start(1, world.baton(first, (1, 2), lease=0, nonce=11), 0, [0, 1])
        world.reader.start(2, world.baton(second, (3, 4), lease=0, nonce=22), 0, [2, 3])
        world.poll_until(lambda: len(world.events) == 2)
        assert all(isinstance(event, FetchLanded) for event in world.events)
        assert [world.pages.holds(page, byte_of(page + 1)) for page in range(4)] == [True] * 4

    def test_a_killed_holder_fails_its_fetches_and_harms_no_other(self, world: FetchWorld) -> None:
        dead, alive = world.make_holder(), world.make_holder()
        dead.write(3, 77)
        alive.write(3, 77)
        world.reader.start(1, world.baton(dead, (5,)), 0, [0])
        assert isinstance(world.next_event(), FetchLanded)
        dead.kill()
        world.reader.start(2, world.baton(dead, (5,)), 0, [1])
        failed = world.next_event()
        assert isinstance(failed, FetchFailed)
        if not failed.ended:
            assert world.next_event() == FetchEnded(2)
        assert world.reader.outstanding == 0
        world.reader.start(3, world.baton(alive, (5,)), 0, [2])
        assert isinstance(world.next_event(), FetchLanded)

    def expect_refusal(self, world: FetchWorld, word: str) -> None:
        [failed] = world.reader.poll()
        assert isinstance(failed, FetchFailed)
        assert failed.ended
        assert word in failed.reason
        assert world.reader.outstanding == 0
        assert world.pages.holds(0, 0)


class AnsweredReadsContract:
    """For transfers whose holder answers reads with its own CPU: one that is frozen answers none."""

    def test_a_read_from_a_frozen_holder_ends_when_the_holder_answers_after_all(
        self, world: FetchWorld
    ) -> None:
        source = self.freeze_in_mid_fetch(world)
        world.reader.start(2, world.baton(source, (5,)), 0, [0])
        refused = world.next_event()
        assert isinstance(refused, FetchFailed)
        assert refused.ended
        assert "has not ended" in refused.reason
        source.thaw()
        assert world.next_event() == FetchEnded(1)
        assert world.reader.readers_fenced == 0
        world.reader.start(3, world.baton(source, (5,)), 0, [0])
        assert isinstance(world.next_event(), FetchLanded)

    def test_a_read_from_a_holder_that_stays_frozen_is_fenced(self, world: FetchWorld) -> None:
        source, other = self.freeze_in_mid_fetch(world), world.make_holder()
        other.write(3, 77)
        world.clock.now += LIMITS.quarantine_seconds
        assert world.next_event() == FetchEnded(1)
        assert world.reader.readers_fenced == 1
        world.reader.start(2, world.baton(other, (5,)), 0, [300])
        assert isinstance(world.next_event(), FetchLanded)
        source.kill()

    def test_the_fence_waits_for_healthy_reads(self, world: FetchWorld) -> None:
        self.freeze_in_mid_fetch(world)
        slow = world.make_holder()
        slow.write(3, 77)
        world.reader.start(2, world.baton(slow, (5,)), 0, [300])
        assert isinstance(world.next_event(), FetchLanded)
        slow.freeze()
        world.reader.start(3, world.baton(slow, (6,)), 0, [301])
        world.clock.now += LIMITS.quarantine_seconds
        for _ in range(100):
            assert world.reader.poll() == []
        slow.thaw()
        world.poll_until(lambda: len(world.events) == 2)
        assert isinstance(world.events[0], FetchLanded)
        assert world.events[1] == FetchEnded(1)

    def freeze_in_mid_fetch(self, world: FetchWorld) -> HolderUnderTest:
        source = world.make_holder()
        source.write(3, 77)
        world.reader.start(0, world.baton(source, (5,)), 0, [0])
        assert isinstance(world.next_event(), FetchLanded)
        source.freeze()
        world.reader.start(1, world.baton(source, tuple(range(0, 400, 2))), 0, list(range(200)))
        assert world.reader.poll() == []
        world.clock.now += LIMITS.fetch_seconds_max
        failed = world.next_event()
        assert isinstance(failed, FetchFailed)
        assert not failed.ended
        assert "timed out" in failed.reason
        return source

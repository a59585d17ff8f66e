"""The contract of fetching, on the in-process transfer; and the table of a fetch's states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import pytest

from shared.baton import Holder
from shared.errors import InvariantError, TransferError
from shared.transfer.fetch_states import TRANSITIONS, Event, State, advance
from shared.transfer.in_process import InProcessFabric, InProcessTransfer
from shared.transfer.memory import WordTable
from shared.transfer.protocol import Collected, Landed
from shared.transfer.self_fetch import self_fetch
from tests.fetcher_contract import (
    KV_FORMAT,
    LEASES,
    LIMITS,
    PAGE_BYTES,
    PAGES,
    AnsweredReadsContract,
    Clock,
    FetcherContract,
    PageBuffer,
    World,
    byte_of,
)


class InProcessHolder:
    """Implements `HolderUnderTest`."""

    def __init__(self, fabric: InProcessFabric, uid: str, clock: Clock):
        self.fabric = fabric
        self.buffer = PageBuffer()
        for page in range(PAGES):
            self.buffer.fill(page, byte_of(page))
        self.transfer = InProcessTransfer(
            fabric, uid, 5, self.buffer.memory, LEASES, KV_FORMAT, limits=LIMITS, clock=clock
        )

    @property
    def holder(self) -> Holder:
        return self.transfer.holder

    def write(self, lease: int, nonce: int) -> None:
        self.transfer.words.write(lease, nonce)

    def clear(self, lease: int) -> None:
        self.transfer.words.clear(lease)

    def collected(self) -> list[Collected]:
        return [event for event in self.transfer.poll() if isinstance(event, Collected)]

    def freeze(self) -> None:
        self.fabric.freeze(self.holder.agent)

    def thaw(self) -> None:
        self.fabric.thaw(self.holder.agent)

    def kill(self) -> None:
        self.fabric.kill(self.holder.agent)


@pytest.fixture
def world() -> Iterator[World]:
    fabric, clock, buffer, numbers = InProcessFabric(), Clock(), PageBuffer(), count()
    reader = InProcessTransfer(
        fabric, "reader", 1, buffer.memory, LEASES, KV_FORMAT, limits=LIMITS, clock=clock
    )
    yield World(reader, buffer, clock, lambda: InProcessHolder(fabric, f"holder{next(numbers)}", clock))
    reader.close()


class TestInProcess(FetcherContract, AnsweredReadsContract):
    """Both contracts: a frozen worker answers no read here."""


@dataclass
class TickingClock(Clock):
    """Every look at it takes time, as posting does where the transport copies within the post."""

    def __call__(self) -> float:
        self.now += 0.005
        return self.now


def polls_until_landed(clock: Clock) -> int:
    fabric, buffer = InProcessFabric(), PageBuffer()
    reader = InProcessTransfer(
        fabric, "reader", 1, buffer.memory, LEASES, KV_FORMAT, limits=LIMITS, clock=clock
    )
    source = InProcessHolder(fabric, "holder", clock)
    world = World(reader, buffer, clock, lambda: source)
    source.write(3, 77)
    reader.start(1, world.baton(source, tuple(range(0, 24, 2))), 0, range(12))  # six portions of two pages
    for polls in count(1):
        match reader.poll():
            case [Landed(fetched_bytes=size)]:
                assert size == 12 * PAGE_BYTES
                assert all(buffer.holds(page, byte_of(2 * page)) for page in range(12))
                return polls
            case []:
                continue
            case others:
                raise AssertionError(others)
    raise AssertionError


def test_a_turn_that_has_spent_its_time_leaves_portions_to_the_next() -> None:
    """Where posting costs nothing all six are under way at once, two polls long; then comes the word."""
    assert polls_until_landed(Clock()) == 3
    assert polls_until_landed(TickingClock()) >= 6


def test_the_self_fetch_passes_and_leaves_no_lease(world: World) -> None:
    assert isinstance(world.reader, InProcessTransfer)
    assert self_fetch(world.reader, world.pages.memory, KV_FORMAT, clock=world.clock) > 0
    assert world.reader.words.read(0) == 0
    assert world.reader.poll() == []


def test_a_self_fetch_that_cannot_land_is_an_error_in_one_sentence(world: World) -> None:
    assert isinstance(world.reader, InProcessTransfer)
    with pytest.raises(TransferError, match="self-fetch of a KV page ended with Failed"):
        self_fetch(world.reader, world.pages.memory, "another format", clock=world.clock)


def test_a_lease_word_in_use_is_never_given_to_another_lease() -> None:
    words = WordTable(2)
    words.write(1, 5)
    with pytest.raises(AssertionError, match="in use"):
        words.write(1, 6)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_every_pair_of_state_and_event_is_in_the_table_or_raises(state: State, event: Event) -> None:
    if event in TRANSITIONS[state]:
        assert advance(state, event) is TRANSITIONS[state][event]
    else:
        with pytest.raises(InvariantError, match=f"{state.value} met {event.value}"):
            advance(state, event)


def test_only_a_done_read_or_the_fence_ends_a_fetch_that_was_given_up() -> None:
    ways = {event for event, state in TRANSITIONS[State.GIVEN_UP].items() if state is State.ENDED}
    assert ways == {Event.READ_DONE, Event.FENCED}

"""The simulated reads are as unreliable as real ones may be, and say so truthfully."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

import pytest

from shared.transfer.protocol import FetchEnded, FetchEvent, FetchFailed, FetchLanded, FetchStale
from shared.wire.baton import Baton, Holder, agent_name
from tests.simulation.adversaries.thief import Thief
from tests.simulation.mistakes.mutations import mutated
from tests.simulation.oracle.device import Pages
from tests.simulation.world.fabric import Agent, Fabric, FabricFaults, FabricWords
from tests.simulation.world.timeline import Timeline, TimelineProcess

NONCE = 77


class Pair:
    """A reader and a holder with four leased pages."""

    def __init__(self, faults: FabricFaults | None = None):
        self.timeline = Timeline()
        self.counts: list[str] = []
        self.fabric = Fabric(faults or FabricFaults(), random.Random(3), self.counts.append)
        self.holder, self.reader = self.agent("holder"), self.agent("reader")
        self.holder.words.write(1, NONCE, (0, 1, 2, 3))
        self.events: list[FetchEvent] = []

    def agent(self, name: str) -> Agent:
        process = TimelineProcess(self.timeline, name)
        holder = Holder(name, 1, agent_name(name, 1), b"", 0, 4096, 0)
        pages = Pages(8, 2, salt=len(name))
        agent = Agent(
            self.fabric,
            process,
            holder,
            pages,
            FabricWords(process, 2, count(NONCE).__next__),
            5.0,
            lambda: None,
        )
        self.fabric.agents[holder.agent] = agent
        return agent

    def fetch(self) -> None:
        baton = Baton("r", 1, self.holder.holder, "", 1, NONCE, 8, 8, (0, 1, 2, 3))
        self.reader.start(1, baton, 1, (5, 6, 7))

    def advance(self, until: Callable[[], bool]) -> None:
        while not until() and self.timeline.advance():
            self.events += self.reader.poll()

    def settle(self) -> None:
        self.advance(lambda: False)

    @property
    def arrived(self) -> list[bool]:
        return [self.reader.pages.cells[4 + page] == self.holder.pages.cells[page] for page in (1, 2, 3)]


def test_pages_land_one_by_one() -> None:
    pair = Pair()
    pair.fetch()
    pair.advance(lambda: any(pair.arrived))
    assert sum(pair.arrived) == 1
    pair.settle()
    assert all(pair.arrived)
    assert [type(event) for event in pair.events] == [FetchLanded]


def test_a_lease_that_ended_meanwhile_makes_the_read_stale() -> None:
    pair = Pair()
    pair.fetch()
    pair.advance(lambda: any(pair.arrived))
    pair.holder.words.clear(1)
    pair.settle()
    assert pair.events == [FetchStale(1)]


def test_a_frozen_holder_leaves_the_read_in_progress() -> None:
    pair = Pair()
    pair.holder.process.freeze()
    pair.fetch()
    pair.timeline.at(1.0, lambda: None)
    pair.advance(lambda: pair.timeline.now >= 1.0)
    assert pair.events == []
    assert not any(pair.arrived)
    pair.holder.process.thaw()
    pair.settle()
    assert all(pair.arrived)


def test_a_dead_holder_makes_the_read_fail() -> None:
    pair = Pair()
    pair.fetch()
    pair.holder.process.kill()
    pair.fabric.died(pair.holder.holder.agent)
    pair.settle()
    assert isinstance(pair.events[0], FetchFailed)


def test_no_agent_is_found_under_the_name_of_an_earlier_epoch() -> None:
    pair = Pair()
    pair.fabric.died(pair.holder.holder.agent)
    pair.fetch()
    pair.settle()
    assert isinstance(pair.events[0], FetchFailed)
    assert not any(pair.arrived)


def test_bytes_land_after_an_error_until_the_read_has_ended() -> None:
    pair = Pair(FabricFaults(error=1.0, unproven=1.0, page_seconds=0.2))
    pair.fetch()
    pair.advance(lambda: bool(pair.events))
    assert pair.events[0] == FetchFailed(1, "injected error", ended=False)
    before = sum(pair.arrived)
    pair.settle()
    assert sum(pair.arrived) > before
    assert pair.events[-1] == FetchEnded(1)


def test_an_endless_read_never_ends() -> None:
    pair = Pair(FabricFaults(error=1.0, unproven=1.0, endless=1.0))
    pair.fetch()
    pair.settle()
    assert [type(event) for event in pair.events] == [FetchFailed]
    assert pair.reader.endless_pages == [5, 6, 7]


def test_an_abandoned_read_sends_nothing_but_its_end() -> None:
    pair = Pair()
    pair.fetch()
    pair.advance(lambda: any(pair.arrived))
    pair.reader.abandon(1)
    pair.settle()
    assert pair.events == [FetchEnded(1)]


def test_a_read_abandoned_when_it_has_landed_ends() -> None:
    pair = Pair()
    pair.fetch()
    while pair.timeline.advance():
        pass
    pair.reader.abandon(1)
    assert pair.reader.poll() == [FetchEnded(1)]


def test_a_tls_holder_leaves_out_the_pages_of_a_lease_that_has_ended() -> None:
    pair = Pair(FabricFaults(tls=True))
    pair.fetch()
    pair.advance(lambda: any(pair.arrived))
    pair.holder.words.clear(1)
    pair.settle()
    assert sum(pair.arrived) == 1
    assert pair.counts.count("page left out") == 2
    assert pair.events == [FetchStale(1)]


def test_a_tls_holder_refuses_pages_that_are_not_the_leases() -> None:
    pair = Pair(FabricFaults(tls=True))
    pair.holder.words.clear(1)
    pair.holder.words.write(1, NONCE, (0, 1, 2))
    pair.fetch()
    pair.settle()
    assert isinstance(pair.events[0], FetchFailed)
    assert pair.events[0].reason == "pages that are not the lease's"


@pytest.mark.parametrize("newer", [True, False])
def test_a_reader_of_the_version_before_is_told_the_word(newer: bool) -> None:
    pair = Pair(FabricFaults(tls=True))
    pair.reader.newer = newer
    pair.fetch()
    pair.settle()
    assert [type(event) for event in pair.events] == [FetchLanded]
    assert pair.counts.count("path a word was told to an older reader") == (not newer)


def test_a_thief_gets_nothing_and_what_it_was_told_opens_nothing() -> None:
    pair = Pair(FabricFaults(tls=True))
    thief = Thief(pair.fabric, random.Random(3), pair.counts.append)
    pair.fetch()
    pair.advance(lambda: any(pair.arrived))
    thief.steal()
    assert "path a lease opened its own pages" in pair.counts
    assert "path a word was told to a thief" in pair.counts
    pair.settle()
    assert [type(event) for event in pair.events] == [FetchLanded], "what had begun goes on"
    pair.fetch()
    pair.settle()
    assert isinstance(pair.events[-1], FetchLanded), "its connection has shown the nonce"


@pytest.mark.parametrize("mistake", ["a lease opens every page", "a word that was told opens the pages"])
def test_a_thief_that_gets_something_is_noticed(mistake: str) -> None:
    pair = Pair(FabricFaults(tls=True))
    pair.fetch()
    with mutated(mistake), pytest.raises(AssertionError, match=r"not its own|without a lease"):
        Thief(pair.fabric, random.Random(3), pair.counts.append).steal()


def test_a_fetch_of_several_ranks_lands_when_all_slices_are_there() -> None:
    pair = Pair(FabricFaults(page_seconds=0.2))
    pair.holder.ranks = 4
    before = [list(cells) for cells in pair.reader.pages.cells]
    pair.fetch()
    pair.advance(lambda: any(pair.reader.pages.cells[page] != before[page] for page in (5, 6, 7)))
    assert not any(pair.arrived), "the first slices of a page are no page"
    assert pair.events == []
    pair.settle()
    assert all(pair.arrived)
    assert [type(event) for event in pair.events] == [FetchLanded]


def test_a_lost_rank_whose_memory_has_gone_makes_the_read_fail() -> None:
    pair = Pair()
    pair.holder.ranks = 2
    pair.fetch()
    pair.fabric.lose_rank(pair.holder.holder.agent)
    pair.settle()
    assert isinstance(pair.events[0], FetchFailed)
    assert not any(pair.arrived)


@pytest.mark.parametrize(
    "mistake", ["", "the target of a fetch is free when rank 0's reads are proven to have ended"]
)
def test_a_fetch_of_several_ranks_that_was_given_up_ends_with_the_last_of_them(mistake: str) -> None:
    pair = Pair(FabricFaults(page_seconds=0.4, unproven=1.0))
    pair.holder.ranks = 4
    with mutated(mistake):
        pair.fetch()
        pair.reader.abandon(1)
        pair.advance(lambda: bool(pair.events))
        assert pair.events == [FetchEnded(1)]
        assert "bytes landed after the end of interest" in pair.counts
        cells = [list(each) for each in pair.reader.pages.cells]
        pair.settle()
    assert pair.events == [FetchEnded(1)]
    assert (pair.reader.pages.cells != cells) == bool(mistake), "nothing lands when all have ended"

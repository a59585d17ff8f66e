"""A rank in another process, as rank 0 knows it: what it answers, what it refuses, and that it does not answer."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from shared.primitives.errors import RankError, StartError, TransferError
from shared.transfer.memory import PageMemory
from shared.transfer.offer import Offer
from shared.transfer.ranks import service, told_rank
from shared.transfer.ranks.commands import OfferPages
from shared.transfer.ranks.service import RankService
from shared.transfer.ranks.told_rank import ToldReader
from shared.transfer.reader import NotPostedError, ReadState
from shared.transfer.slices import parts_of
from shared.wire.baton import Baton
from tests.doubles.in_process_transfer import InProcessFabric
from tests.fetcher_contract import Clock
from tests.unit.transfer.ranked_pages import (
    RankedWorker,
    ServedRanks,
    cut_of,
    in_process,
    offer_command,
    ranked_worker,
)


@pytest.fixture
def fabric() -> InProcessFabric:
    return InProcessFabric()


@pytest.fixture
def worker(fabric: InProcessFabric) -> RankedWorker:
    """A worker of two ranks, the second of which is told."""
    return ranked_worker(cut_of(2), Clock(), in_process(fabric, "own"), told=True)


@pytest.fixture
def served(worker: RankedWorker) -> ServedRanks:
    assert worker.served is not None
    return worker.served


def read_of(reader: ToldReader, worker: RankedWorker, baton: Baton) -> int:
    """A read of the second rank's part."""
    (part,) = [part for part in parts_of(worker.transfer.holder, baton.holder) if part.rank == 1]
    return reader.read_pages(baton, part, baton.pages, range(len(baton.pages)))


def reader_of(served: ServedRanks) -> ToldReader:
    (rank,) = served.told()
    assert rank.described.slices == cut_of(2).heads // 2
    reader = rank.make_reader()
    assert isinstance(reader, ToldReader)
    return reader


def test_a_read_is_under_way_until_the_rank_has_reported_its_end(
    worker: RankedWorker, served: ServedRanks
) -> None:
    reader = reader_of(served)
    handle = read_of(reader, worker, worker.baton([4]))
    assert reader.state(handle) is ReadState.READING
    served.services[0].turn(0)
    assert reader.state(handle) is ReadState.READING, "the report lies there"
    reader.look()
    assert reader.state(handle) is ReadState.DONE
    reader.release(handle)
    assert reader.state(handle) is ReadState.READING, "it is forgotten"
    reader.close()


def test_a_read_that_the_rank_cannot_post_has_ended(
    worker: RankedWorker, served: ServedRanks, fabric: InProcessFabric
) -> None:
    reader, baton = reader_of(served), worker.baton([4])
    fabric.unreachable.add(baton.holder.ranks[0].agent)
    with capture_logs() as lines:
        for _ in range(5):
            handle = read_of(reader, worker, baton)
            served.services[0].turn(0)
            reader.look()
            assert reader.state(handle) is ReadState.REFUSED
    assert [line["times"] for line in lines] == [1, 2, 4], "such a peer fills no log"


def test_a_command_that_is_longer_than_the_port_takes_is_not_posted(
    worker: RankedWorker, served: ServedRanks
) -> None:
    """A peer's metadata is as long as the peer says; the router's bound is below it."""
    reader, baton = reader_of(served), worker.baton([4])
    (rank,) = baton.holder.ranks
    long = msgspec.structs.replace(rank, metadata=bytes(served.command_bytes_max))
    holder = msgspec.structs.replace(baton.holder, ranks=(long,))
    with pytest.raises(NotPostedError, match=r"a command of \d+ bytes to rank 1: at most"):
        read_of(reader, worker, msgspec.structs.replace(baton, holder=holder))
    handle = read_of(reader, worker, baton)
    served.services[0].turn(0)
    reader.look()
    assert reader.state(handle) is ReadState.DONE


def test_what_a_rank_cannot_offer_keeps_the_worker_from_starting(worker: RankedWorker) -> None:
    def refuse(_told: OfferPages, _pages: PageMemory) -> Offer:
        raise StartError("no port of 20000-20007 is free")

    served = ServedRanks([worker.buffer.ranks[1].memory], worker.offers[1:])
    served.services[0]._make_offer = refuse
    (rank,) = served.told()
    with pytest.raises(TransferError, match="rank 1: no port of 20000-20007 is free"):
        _ = rank.described


def test_a_reader_that_a_rank_cannot_make_is_refused_and_the_next_one_made(
    served: ServedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rank,) = served.told()
    _ = rank.described
    with monkeypatch.context() as patch:
        patch.setattr(RankService, "_reader", lambda _: (_ for _ in ()).throw(TransferError("no port")))
        with pytest.raises(TransferError, match="rank 1: no port"):
            rank.make_reader()
    rank.make_reader().close()
    assert not rank._ended, "what was not made is tried again each second"


def test_a_rank_that_does_not_answer_ends_the_worker(
    served: ServedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages could be written at any time, so nothing that they are for may go on."""
    reader = reader_of(served)
    monkeypatch.setattr(told_rank, "ANSWER_SECONDS_MAX", 0.05)
    monkeypatch.setattr(served, "wait", lambda _rank, _seconds: None)
    with pytest.raises(RankError, match="rank 1 has not closed a reader within"):
        reader.close()


def test_all_ranks_close_a_reader_at_the_same_time(
    fabric: InProcessFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that waited for one after the other would stand still as often as there are ranks."""
    worker = ranked_worker(cut_of(4), Clock(), in_process(fabric, "four"), told=True)
    served, told = worker.served, list[list[int]]()
    assert served is not None
    reader, wait = worker.transfer._make_reader(), served.wait

    def note(rank: int, seconds: float) -> None:
        told.append([each._told.qsize() for each in served.services])
        wait(rank, seconds)

    monkeypatch.setattr(served, "wait", note)
    reader.close()
    assert told[0] == [1, 1, 1]
    assert told[-1] == [0, 0, 1], "and each of them is waited for"


def test_an_offer_that_is_longer_than_the_port_takes_is_refused(served: ServedRanks) -> None:
    (rank,) = served.told()
    long = msgspec.structs.replace(offer_command(), uid="u" * served.command_bytes_max)
    with pytest.raises(TransferError, match="at most"):
        rank.ask_offer(long)


def test_what_happens_at_a_told_ranks_port_counts_as_the_workers(
    worker: RankedWorker, served: ServedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "monotonic", count(10**12).__next__)  # each turn is a second later
    own, other = (offer.counters for offer in worker.offers)
    own.refused_handshake, other.refused_handshake = 1, 2
    own.count_read("10.0.0.1", answered=True)
    other.count_read("10.0.0.1", answered=True)
    other.count_read("10.0.0.2", answered=False)
    served.services[0].turn(0)
    found = worker.transfer.counters
    assert found.refused_handshake == 3
    assert (found.reads, found.reads_refused) == ({"10.0.0.1": 2}, {"10.0.0.2": 1})
    assert own.refused_handshake == 1, "rank 0 goes on counting its own"
    other.refused_crowded += 4
    served.services[0].turn(0)
    assert worker.transfer.counters.refused_crowded == 4


def test_a_port_that_counts_a_new_peer_meanwhile_keeps_no_count_from_being_shown(
    worker: RankedWorker,
) -> None:
    """Threads of the port count while the loop adds up."""

    class Growing(Counter[str]):
        def items(self) -> Any:
            for at, each in enumerate(super().items()):
                self[f"10.0.1.{at}"] = 1
                yield each

    own, other = (offer.counters for offer in worker.offers)
    other.reads["10.0.0.2"] = 1
    own.reads = Growing({"10.0.0.1": 2})
    assert worker.transfer.counters.reads["10.0.0.1"] == 2

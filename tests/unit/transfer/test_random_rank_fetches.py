"""No byte is wrong between workers of any ranks, whatever happens; and mistakes in what proves it are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shared.transfer import fetches, slices
from shared.transfer.fetches import Fetches
from shared.transfer.protocol import FetchFailed
from shared.transfer.rank_reader import RankReader, ReadHandle, WorkerReader
from shared.transfer.ranks.commands import ReadEnded
from shared.transfer.ranks.service import RankService
from shared.transfer.ranks.told_rank import ToldRank
from shared.transfer.reader import ENDED, ReadState
from shared.transfer.slices import SlicePart
from shared.wire.baton import Baton, Holder
from tests.doubles.in_process_transfer import InProcessReader
from tests.unit.transfer.random_rank_fetches import RandomRankFetches, WrongBytesError

SEEDS = 400
SEEDS_MAX = 60  # in which each mistake must be found


def test_every_page_that_has_landed_is_the_one_that_was_leased() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        run = RandomRankFetches(seed)
        run.run()
        counts += run.counts
    for what in (
        "FetchLanded",
        "FetchStale",
        "FetchFailed",
        "FetchEnded",
        "ranks frozen",
        "holders lost",
        "ranks cut off",
        "turns of told ranks",
    ):
        assert counts[what] >= 5, f"{what} is rare: {counts}"
    assert counts["FetchLanded"] >= 5 * SEEDS


Plant = Callable[[pytest.MonkeyPatch], None]


def word_of_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    """The word is read when the first read of any rank has ended, and serves for all of them."""
    state, read_pages, read_word, word = (
        WorkerReader.state,
        WorkerReader.read_pages,
        WorkerReader.read_word,
        WorkerReader.word,
    )
    batons: dict[tuple[int, ReadHandle], Baton] = {}
    early: dict[int, int] = {}  # by nonce
    slots: dict[int, int] = {}

    def post(self: WorkerReader, baton: Baton, *others: Any) -> ReadHandle:
        handle = read_pages(self, baton, *others)
        batons[id(self), handle] = baton
        return handle

    def look(self: WorkerReader, handle: ReadHandle) -> ReadState:
        found = state(self, handle)
        baton = batons.get((id(self), handle))
        if baton and found in ENDED and baton.nonce not in early:
            reader: Any = self._own._reader
            assert isinstance(reader, InProcessReader)
            asked = reader.read_word(baton, 0)
            if reader.state(asked) is ReadState.DONE:
                early[baton.nonce] = reader.word(0)
        return found

    def post_word(self: WorkerReader, baton: Baton, slot: int) -> ReadHandle:
        slots[slot] = baton.nonce
        return read_word(self, baton, slot)

    patch.setattr(WorkerReader, "read_pages", post)
    patch.setattr(WorkerReader, "state", look)
    patch.setattr(WorkerReader, "read_word", post_word)
    patch.setattr(WorkerReader, "word", lambda self, slot: early.get(slots[slot], word(self, slot)))


def own_rank_alone(patch: pytest.MonkeyPatch) -> None:
    """A fetch has ended when the reads of rank 0 have."""
    state, release = WorkerReader.state, WorkerReader.release

    def look(self: WorkerReader, handle: ReadHandle) -> ReadState:
        found = state(self, handle)
        return ReadState.DONE if handle[0] and found is ReadState.READING else found

    def forget(self: WorkerReader, handle: ReadHandle) -> None:
        if state(self, handle) in ENDED:
            release(self, handle)

    patch.setattr(WorkerReader, "state", look)
    patch.setattr(WorkerReader, "release", forget)


def ended_without_proof(patch: pytest.MonkeyPatch) -> None:
    """A fetch that was given up is said to have ended, while the read of one rank goes on."""

    def failed(fetch_id: int, reason: str, ended: bool) -> FetchFailed:
        del ended
        return FetchFailed(fetch_id, reason, ended=True)

    patch.setattr(fetches, "FetchFailed", failed)


def fence_of_the_own_rank(patch: pytest.MonkeyPatch) -> None:
    """Closing a reader closes rank 0's alone; others' reads are still looked at somewhere."""
    kept: list[tuple[Any, ReadHandle]] = []
    poll = Fetches.poll

    def close(self: WorkerReader) -> None:
        for rank in self._ranks[1:]:
            if isinstance(rank, RankReader):  # one that is told has turns of its own
                reader: Any = rank
                kept.extend((reader, handle) for handle in reader._reader._reads)
        self._own.close()

    def poll_and_move(self: Fetches) -> Any:
        for reader, handle in kept:
            reader._reader.state(handle)
        return poll(self)

    patch.setattr(WorkerReader, "close", close)
    patch.setattr(Fetches, "poll", poll_and_move)


def slices_of_another_head(patch: pytest.MonkeyPatch) -> None:
    """What is read of a source begins with its first slice."""

    def parts_of(own: Holder, peer: Holder) -> tuple[SlicePart, ...]:
        return tuple(part._replace(source_offset=0) for part in slices.parts_of(own, peer))

    patch.setattr(fetches, "parts_of", parts_of)


def end_told_when_posted(patch: pytest.MonkeyPatch) -> None:
    """A rank reports that a read is done when it has posted it; its bytes come later."""
    post = RankService._post

    def post_and_report(self: RankService, told: Any) -> None:
        post(self, told)
        if (told.generation, told.read) in self._reads:
            self._report(ReadEnded(told.generation, told.read, ReadState.DONE))

    patch.setattr(RankService, "_post", post_and_report)


def fence_without_an_answer(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 tells a rank to close its reader, and does not wait until it has."""
    patch.setattr(ToldRank, "await_closed", lambda *_: None)


def refused_read_is_done(patch: pytest.MonkeyPatch) -> None:
    """A read that a rank could not post counts as one that is done."""
    note = ToldRank._note_end

    def note_done(self: ToldRank, report: ReadEnded) -> None:
        done = report.state is ReadState.REFUSED
        note(self, msgspec.structs.replace(report, state=ReadState.DONE) if done else report)

    patch.setattr(ToldRank, "_note_end", note_done)


def no_patch(_: pytest.MonkeyPatch) -> None:
    """The mistake is the holder's."""


MISTAKES: dict[str, Plant] = {
    "the word is read when the first rank is done": word_of_the_first_rank,
    "a fetch has ended when rank 0's reads have": own_rank_alone,
    "targets are free though a rank's read was never proven to have ended": ended_without_proof,
    "the fence is of rank 0 alone": fence_of_the_own_rank,
    "slices are put at the wrong head": slices_of_another_head,
    "a told rank says done when it has posted": end_told_when_posted,
    "the fence waits for no told rank": fence_without_an_answer,
    "a read that a told rank could not post is done": refused_read_is_done,
    "the word is cleared after the pages are filled anew": no_patch,
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[name](monkeypatch)
    for seed in range(SEEDS_MAX):
        try:
            RandomRankFetches(seed, clears_late=MISTAKES[name] is no_patch).run()
        except WrongBytesError:
            return
    pytest.fail(f"{name}: nobody has noticed in {SEEDS_MAX} seeds")

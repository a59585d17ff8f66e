"""Leases that rank 0 writes to shared memory, as another rank sees them."""

from __future__ import annotations

import mmap
import os

import pytest

from shared.transfer.grants import Shown, Verdict
from shared.transfer.ranks.shared_leases import SeenGrants, SharedLeases, WrittenGrants

LEASES, PAGES_MAX = 5, 12


@pytest.fixture
def memory() -> memoryview:
    return memoryview(mmap.mmap(-1, SharedLeases.bytes_for(LEASES, PAGES_MAX)))


@pytest.fixture
def written(memory: memoryview) -> WrittenGrants:
    return WrittenGrants(SharedLeases(memory, LEASES, PAGES_MAX))


@pytest.fixture
def seen(memory: memoryview) -> SeenGrants:
    """Its own map of the memory, as in another process."""
    return SeenGrants(SharedLeases(memory, LEASES, PAGES_MAX))


def test_a_lease_is_open_at_the_other_rank_at_once_and_ends_there_at_once(
    written: WrittenGrants, seen: SeenGrants
) -> None:
    shown: Shown = {}
    assert seen.pages(shown, 3, 77, [range(4, 5)]) is Verdict.GONE
    nonce = written.open(3, (4, 9, 5))
    assert written.read(3) == seen.read(3) == nonce
    assert seen.pages(shown, 3, nonce, [range(4, 6), range(9, 10)]) is Verdict.GIVEN
    assert seen.pages(shown, 3, nonce, [range(4, 7)]) is Verdict.BEYOND
    assert seen.pages({}, 3, nonce + 1, [range(4, 5)]) is Verdict.GONE
    written.clear(3)
    assert not seen.holds(shown, 3, nonce)
    assert seen.read(3) == 0


def test_a_lease_that_is_given_again_opens_its_new_pages_alone(
    written: WrittenGrants, seen: SeenGrants
) -> None:
    first = written.open(0, tuple(range(PAGES_MAX)))
    assert seen.holds({}, 0, first)
    written.clear(0)
    second = written.open(0, (7,))
    assert seen.pages({}, 0, second, [range(7, 8)]) is Verdict.GIVEN
    assert seen.pages({}, 0, second, [range(6, 8)]) is Verdict.BEYOND
    assert not seen.holds({}, 0, first)


def test_two_leases_never_share_a_word(written: WrittenGrants) -> None:
    written.open(1, (2,))
    with pytest.raises(AssertionError, match="lease 1 is in use"):
        written.open(1, (3,))


def test_no_rank_tells_a_word_that_opens_the_pages_of_another(
    written: WrittenGrants, seen: SeenGrants
) -> None:
    """A worker with the deployment's key may say that it is of the release before, at any rank, and ask for a word."""
    nonce = written.open(1, (2, 3))
    for asked, other in ((written, seen), (seen, written)):
        thief: Shown = {}
        told = asked.tell(thief, 1)
        assert other.pages({}, 1, told, [range(2, 3)]) is Verdict.GONE
        assert asked.pages({}, 1, nonce, [range(2, 3)]) is Verdict.GIVEN, "who has the baton reads on"


@pytest.mark.parametrize("meanwhile", ["before", "after"])
def test_pages_that_are_read_while_their_lease_is_given_again_are_nobodys(
    meanwhile: str, memory: memoryview, written: WrittenGrants
) -> None:
    """Rank 0 goes on while another rank looks: pages must be those of the word that it has seen."""
    table = SharedLeases(memory, LEASES, PAGES_MAX)
    again: list[int] = []

    class Overtaken(SharedLeases):
        def pages(self, lease: int) -> list[int]:
            found = super().pages(lease)
            if not again:
                written.clear(lease)
                again.append(written.open(lease, (7, 8)))
            return super().pages(lease) if meanwhile == "before" else found

    first = written.open(2, (4, 5))
    seen = SeenGrants(Overtaken(memory, LEASES, PAGES_MAX))
    assert seen.pages({}, 2, first, [range(4, 5)]) is Verdict.GONE
    assert table.word(2) == again[0]
    assert seen.pages({}, 2, again[0], [range(7, 9)]) is Verdict.GIVEN
    assert seen.pages({}, 2, again[0], [range(4, 5)]) is Verdict.BEYOND


def test_a_table_takes_the_memory_of_what_leases_have_used_and_no_more() -> None:
    leases, pages_max, used, pages = 4096, 1 << 20, 64, 2048  # 17 GB, if all of it were used
    made = os.memfd_create("leases")
    size = SharedLeases.bytes_for(leases, pages_max)
    os.ftruncate(made, size)
    written = WrittenGrants(SharedLeases(memoryview(mmap.mmap(made, size)), leases, pages_max))
    for lease in range(used):
        written.open(lease, tuple(range(pages)))
    seen = SeenGrants(SharedLeases(memoryview(mmap.mmap(made, size)), leases, pages_max))
    assert seen.pages({}, used - 1, written.read(used - 1), [range(pages)]) is Verdict.GIVEN
    taken = os.fstat(made).st_blocks * 512
    os.close(made)
    # Words and counts are two arrays; a lease begins and ends in a page of memory that may not be full.
    assert used * pages * 4 <= taken <= 16 * leases + used * (pages * 4 + 2 * mmap.PAGESIZE)

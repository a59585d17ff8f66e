"""Claims about the books of pages: every page has one state, and none is given out twice or too early."""

from __future__ import annotations

import pytest

from shared.kv.page_pool import _CODES, MOVES, PagePool, PageState
from shared.primitives.errors import InvariantError

FREE, TREE, OWNED = PageState.FREE, PageState.TREE, PageState.OWNED
ARRIVING, COPYING = PageState.ARRIVING, PageState.COPYING
RETIRING, QUARANTINED = PageState.RETIRING, PageState.QUARANTINED


def _pool_with_a_page_in(state: PageState) -> tuple[PagePool, int]:
    """A pool of 4 whose returned page came to `state` by the ordinary way."""
    pool = PagePool(4)
    ways = {TREE: OWNED, QUARANTINED: ARRIVING}
    first = ways.get(state, state)
    if state is FREE:
        return pool, 0
    if state is RETIRING:
        pages = pool.allocate(1, OWNED)
        pool.retire(pages, OWNED, after_step=1)
        return pool, pages[0]
    pages = pool.allocate(1, first)
    if state is not first:
        pool.move(pages, first, state)
    return pool, pages[0]


def test_pages_are_handed_out_in_the_order_they_became_free() -> None:
    pool = PagePool(4)
    first = pool.allocate(4, OWNED)
    pool.retire([2, 0], OWNED, after_step=0)
    pool.retire([3], OWNED, after_step=0)

    assert first == [0, 1, 2, 3]
    assert pool.allocate(3, ARRIVING) == [2, 0, 3]


def test_more_pages_than_are_free_are_refused_and_nothing_is_taken() -> None:
    pool = PagePool(3)
    with pytest.raises(InvariantError, match="4 pages wanted as OWNED, 3 free"):
        pool.allocate(4, OWNED)
    assert pool.free == 3
    pool.check()


def test_allocating_all_or_none_is_fine() -> None:
    pool = PagePool(3)
    assert pool.allocate(0, OWNED) == []
    assert len(pool.allocate(3, COPYING)) == 3
    assert pool.free == 0
    pool.check()


@pytest.mark.parametrize("state", [FREE, TREE, RETIRING, QUARANTINED])
def test_pages_are_not_allocated_into_a_state_that_others_must_lead_to(state: PageState) -> None:
    with pytest.raises(InvariantError, match=f"not allocated as {state.name}"):
        PagePool(3).allocate(1, state)


@pytest.mark.parametrize("before", PageState)
@pytest.mark.parametrize("after", PageState)
def test_a_page_moves_along_the_table_and_no_other_way(before: PageState, after: PageState) -> None:
    pool, page = _pool_with_a_page_in(before)
    if after in MOVES.get(before, ()):
        pool.move([page], before, after)
        assert pool.state(page) is after
    else:
        with pytest.raises(InvariantError, match=f"do not move from {before.name} to {after.name}"):
            pool.move([page], before, after)
        assert pool.state(page) is before
    pool.check()


@pytest.mark.parametrize("before", [OWNED, ARRIVING, COPYING, TREE, QUARANTINED])
def test_a_page_of_any_holder_can_be_retired(before: PageState) -> None:
    pool, page = _pool_with_a_page_in(before)
    pool.retire([page], before, after_step=1)
    assert pool.state(page) is RETIRING
    pool.reclaim(1)
    assert pool.state(page) is FREE
    pool.check()


@pytest.mark.parametrize("before", [FREE, RETIRING])
def test_a_page_that_nobody_holds_cannot_be_retired(before: PageState) -> None:
    pool, page = _pool_with_a_page_in(before)
    with pytest.raises(InvariantError, match="do not retire"):
        pool.retire([page], before, after_step=1)


@pytest.mark.parametrize("twice", [[0, 0], [1, 0, 1]])
def test_giving_a_page_up_twice_is_found_at_once(twice: list[int]) -> None:
    pool = PagePool(2)
    pool.allocate(2, OWNED)
    with pytest.raises(InvariantError, match=f"page {twice[-1]} is FREE, not OWNED|is RETIRING, not OWNED"):
        pool.retire(twice, OWNED, after_step=0)


def test_a_mistaken_holder_is_named_with_the_page() -> None:
    pool = PagePool(2)
    pool.allocate(2, ARRIVING)
    with pytest.raises(InvariantError, match="page 1 is ARRIVING, not OWNED on its way to TREE"):
        pool.move([1], OWNED, TREE)


def test_a_retired_page_is_not_free_before_its_step_has_completed() -> None:
    pool = PagePool(1)
    pages = pool.allocate(1, OWNED)
    pool.retire(pages, OWNED, after_step=7)
    pool.reclaim(6)
    assert (pool.free, pool.count(RETIRING)) == (0, 1)
    pool.reclaim(7)
    assert (pool.free, pool.count(RETIRING)) == (1, 0)


def test_a_page_whose_step_has_completed_is_free_at_once() -> None:
    pool = PagePool(1)
    pool.reclaim(7)
    pool.retire(pool.allocate(1, OWNED), OWNED, after_step=7)
    assert pool.free == 1


def test_one_report_reclaims_all_earlier_steps_oldest_first() -> None:
    pool = PagePool(3)
    pool.allocate(3, OWNED)
    for page, step in [(0, 5), (1, 3), (2, 9)]:
        pool.retire([page], OWNED, after_step=step)
    pool.reclaim(5)
    assert pool.allocate(2, OWNED) == [1, 0]
    assert pool.count(RETIRING) == 1


def test_a_late_report_of_an_earlier_step_takes_nothing_back() -> None:
    pool = PagePool(1)
    pool.reclaim(7)
    pool.reclaim(3)
    pool.retire(pool.allocate(1, OWNED), OWNED, after_step=5)
    assert pool.free == 1


def test_counts_tell_every_state() -> None:
    pool = PagePool(5)
    pool.allocate(2, OWNED)
    pool.move([0], OWNED, TREE)
    pool.allocate(1, ARRIVING)
    expected = dict.fromkeys(PageState, 0) | {FREE: 2, OWNED: 1, TREE: 1, ARRIVING: 1}
    assert pool.counts() == expected


@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        pytest.param(
            lambda pool: pool._free.append(3), "page 3 is twice in the free list", id="listed twice"
        ),
        pytest.param(
            lambda pool: pool._free.append(0), "page 0 is in the free list but OWNED", id="free though owned"
        ),
        pytest.param(lambda pool: pool._free.pop(), "2 pages in the free list, but 3 FREE", id="leaked"),
        pytest.param(
            lambda pool: pool._codes.__setitem__(0, _CODES[TREE]),
            "page states .* but counted",
            id="state changed",
        ),
        pytest.param(
            lambda pool: pool._counts.__setitem__(FREE, 9), "5 pages, but the states add up", id="miscounted"
        ),
        pytest.param(lambda pool: pool._retiring.clear(), "retiring list, but 1 RETIRING", id="forgotten"),
        pytest.param(lambda pool: setattr(pool, "completed", 4), "completed steps .4", id="overdue"),
    ],
)
def test_the_check_finds_books_that_do_not_balance(corrupt: object, complaint: str) -> None:
    pool = PagePool(5)
    pool.allocate(2, OWNED)
    pool.retire([1], OWNED, after_step=4)
    pool.check()
    assert callable(corrupt)
    corrupt(pool)
    with pytest.raises(InvariantError, match=complaint):
        pool.check()

"""Claims about eviction: what may go, in which order, and when its pages are free."""

from __future__ import annotations

import pytest

from shared.kv.page_pool import PageState
from shared.kv.radix_cache import EVICTION_POLICIES, EvictionPolicy, RadixCache
from tests.unit.kv.lettered_pages import block, cached, check, insert, new_cache, tokens


def _insert_during_step(cache: RadixCache, name: str, step: int) -> None:
    """Cache one page that a request gave up while `step` ran."""
    node = cache.insert(block(name), cache.pool.allocate(1, PageState.OWNED)).node
    cache.lock(node)
    cache.unlock(node, last_step=step)


def test_locked_pages_are_never_evicted() -> None:
    cache = new_cache()
    insert(cache, "ab")
    insert(cache, "ax")
    held = cache.match_prefix(tokens("ab"))
    cache.lock(held.node)
    assert cache.evict(99) == 1
    assert cache.match_prefix(tokens("ab")).pages == held.pages
    check(cache)


def test_a_prefix_stays_locked_until_all_its_holders_have_let_go() -> None:
    cache = new_cache()
    insert(cache, "ab")
    node = cache.match_prefix(tokens("ab")).node
    cache.lock(node)
    cache.lock(node)
    cache.unlock(node, last_step=0)
    assert (cache.evict(2), cache.locks) == (0, 1)
    cache.unlock(node, last_step=0)
    assert (cache.evict(2), cache.locks) == (2, 0)


def test_eviction_gives_up_no_more_than_asked_for_and_ends_of_prefixes_first() -> None:
    cache = new_cache()
    insert(cache, "abcdef")
    assert cache.evict(2) == 2
    assert cached(cache, "abcdef") == 4
    check(cache)


def test_leaves_go_before_what_they_hang_on() -> None:
    cache = new_cache()
    insert(cache, "ab")
    insert(cache, "abc")
    insert(cache, "abd")
    cache.match_prefix(tokens("abd"))
    assert cache.evict(2) == 2
    assert cached(cache, "abd") == 2
    check(cache)


def test_a_prefix_can_be_cached_again_after_its_eviction() -> None:
    cache = new_cache(pages=2)
    insert(cache, "ab")
    assert cache.evict(2) == 2
    insert(cache, "cd")
    assert (cached(cache, "ab"), cached(cache, "cd")) == (0, 2)
    check(cache)


def test_evicted_pages_wait_for_the_last_step_that_may_touch_them() -> None:
    cache = new_cache(pages=2)
    insert(cache, "ab")
    node = cache.match_prefix(tokens("ab")).node
    cache.lock(node)
    cache.unlock(node, last_step=5)
    assert cache.evict(2) == 2
    assert (cache.pool.free, cache.pool.count(PageState.RETIRING)) == (0, 2)
    cache.pool.reclaim(5)
    assert cache.pool.free == 2


def test_a_split_keeps_the_last_step_on_both_halves() -> None:
    cache = new_cache(pages=2)
    insert(cache, "ab")
    node = cache.match_prefix(tokens("ab")).node
    cache.lock(node)
    cache.unlock(node, last_step=5)
    cache.match_prefix(tokens("a"))
    cache.evict(2)
    assert cache.pool.count(PageState.RETIRING) == 2


def test_an_unlock_by_an_earlier_step_does_not_shorten_the_wait() -> None:
    cache = new_cache(pages=2)
    insert(cache, "ab")
    node = cache.match_prefix(tokens("ab")).node
    for step in (5, 3):
        cache.lock(node)
        cache.unlock(node, last_step=step)
    cache.evict(2)
    cache.pool.reclaim(4)
    assert cache.pool.free == 0


def test_pages_inserted_during_a_step_wait_for_it() -> None:
    cache = new_cache(pages=1)
    _insert_during_step(cache, "a", step=2)
    cache.evict(1)
    assert cache.pool.count(PageState.RETIRING) == 1


def test_waiting_for_a_step_does_not_evict_once_more() -> None:
    cache = new_cache(pages=4)
    for name in "abcd":
        _insert_during_step(cache, name, step=1)
    assert not cache.make_room(2)
    assert not cache.make_room(2)
    assert cache.pool.count(PageState.TREE) == 2
    cache.pool.reclaim(1)
    assert cache.make_room(2)
    assert cache.pool.count(PageState.TREE) == 2


def test_room_that_is_free_already_costs_no_cached_page() -> None:
    cache = new_cache(pages=4)
    insert(cache, "ab")
    assert cache.make_room(2)
    assert cached(cache, "ab") == 2


def _history(cache: RadixCache) -> None:
    """a: first in, matched thrice, low priority; b: matched once, early; c: last in, never matched."""
    insert(cache, "a", priority=1)
    insert(cache, "b", priority=9)
    cache.match_prefix(tokens("b"))
    insert(cache, "c", priority=5)
    for _ in range(3):
        cache.match_prefix(tokens("a"))


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        pytest.param("lru", "bca", id="lru: the longest unused first"),
        pytest.param("lfu", "cba", id="lfu: the least often matched first"),
        pytest.param("fifo", "abc", id="fifo: the first in first"),
        pytest.param("mru", "acb", id="mru: the last used first"),
        pytest.param("filo", "cba", id="filo: the last in first"),
        pytest.param("priority", "acb", id="priority: the least important first"),
        pytest.param("slru", "bca", id="slru: those matched once before those matched often"),
    ],
)
def test_a_policy_evicts_in_its_order(policy: EvictionPolicy, order: str) -> None:
    cache = new_cache(policy=policy)
    _history(cache)
    gone = ""
    while cache.evict(1):
        gone += "".join(name for name in "abc" if name not in gone and not cached(cache, name))
    assert gone == order


def test_slru_protects_what_was_matched_twice_even_from_a_newer_scan() -> None:
    cache = new_cache(policy="slru")
    insert(cache, "a")
    cache.match_prefix(tokens("a"))
    cache.match_prefix(tokens("a"))
    insert(cache, "s")
    insert(cache, "t")
    cache.evict(2)
    assert [cached(cache, name) for name in "ast"] == [1, 0, 0]


def test_a_higher_priority_raises_the_whole_prefix_it_needs() -> None:
    cache = new_cache(policy="priority")
    insert(cache, "ab", priority=0)
    insert(cache, "x", priority=3)
    insert(cache, "ab", priority=7)
    cache.evict(1)
    assert (cached(cache, "ab"), cached(cache, "x")) == (2, 0)


def test_a_lower_priority_does_not_take_away_what_a_higher_one_gave() -> None:
    cache = new_cache(policy="priority")
    insert(cache, "a", priority=7)
    insert(cache, "x", priority=3)
    insert(cache, "a", priority=0)
    cache.evict(1)
    assert (cached(cache, "a"), cached(cache, "x")) == (1, 0)


def test_a_split_keeps_the_hits_on_both_halves() -> None:
    cache = new_cache(policy="lfu")
    insert(cache, "ab")
    insert(cache, "x")
    for names in ("ab", "ab", "ab", "x", "x", "a"):
        cache.match_prefix(tokens(names))
    cache.evict(2)  # of 3 and 2 hits, x goes first
    assert (cached(cache, "ab"), cached(cache, "x")) == (1, 0)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'arc'"):
        new_cache(policy="arc")  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_every_policy_can_empty_the_tree(policy: EvictionPolicy) -> None:
    cache = new_cache(policy=policy)
    for names in ("abc", "abd", "ax", "y"):
        insert(cache, names)
    assert cache.evict(99) == 6
    assert cache.pool.free == cache.pool.total
    check(cache)


def test_many_matches_without_eviction_do_not_grow_the_list_of_victims() -> None:
    cache = new_cache()
    insert(cache, "ab")
    insert(cache, "cd")
    for _ in range(1000):
        cache.match_prefix(tokens("ab"))
    assert len(cache._victims) < 100
    cache.evict(2)
    assert cached(cache, "ab") == 2

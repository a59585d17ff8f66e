"""Claims about the order of the queue and about sharing prefixes within it."""

from __future__ import annotations

import pytest

from shared.batch.req import Req
from shared.kv.radix_cache import RadixCache
from shared.scheduling.queue_policy import (
    QUEUE_POLICIES,
    InBatchPrefix,
    QueuePolicy,
    aged_first,
    order_waiting,
)
from tests.unit.kv.lettered_pages import PAGE, cached, check, insert, new_cache, request

QUEUE_MAX = 50


def _arrivals(reqs: list[Req]) -> list[int]:
    return [req.sequence for req in reqs]


def _order(policy: QueuePolicy, waiting: list[Req], cache: RadixCache | None = None) -> list[int]:
    return _arrivals(order_waiting(policy, waiting, cache or new_cache(), prefix_aware_queue_max=QUEUE_MAX))


def _waiting() -> list[Req]:
    """Not in the order of arrival, as after a requeue."""
    return [
        request("abz", 3, max_new_tokens=5, priority=1),
        request("x", 1, max_new_tokens=9),
        request("abcz", 4, max_new_tokens=5, priority=7),
        request("pz", 2, max_new_tokens=2, priority=7),
    ]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        pytest.param("fcfs", [1, 2, 3, 4], id="fcfs: by arrival, not by place in the queue"),
        pytest.param("lpm", [4, 3, 2, 1], id="lpm: three pages cached, then two, then one"),
        pytest.param("lof", [1, 3, 4, 2], id="lof: most output to come first, equal ones by arrival"),
        pytest.param("priority", [2, 4, 3, 1], id="priority: the highest first, equal ones by arrival"),
    ],
)
def test_a_policy_orders_the_queue(policy: QueuePolicy, order: list[int]) -> None:
    cache = new_cache()
    insert(cache, "abc")
    insert(cache, "p")
    assert _order(policy, _waiting(), cache) == order


@pytest.mark.parametrize("policy", QUEUE_POLICIES)
def test_every_policy_keeps_every_request_once_and_is_the_same_on_every_run(policy: QueuePolicy) -> None:
    cache = new_cache()
    insert(cache, "abc")
    first = _order(policy, _waiting(), cache)
    assert sorted(first) == [1, 2, 3, 4]
    assert _order(policy, _waiting()[::-1], cache) == first
    assert _order(policy, [], cache) == []


@pytest.mark.parametrize("policy", QUEUE_POLICIES)
def test_those_that_have_waited_long_go_first_whatever_the_policy(policy: QueuePolicy) -> None:
    waiting = _waiting()
    for req in waiting:
        req.arrived_at = float(req.sequence)
    ordered = order_waiting(policy, waiting, new_cache(), prefix_aware_queue_max=QUEUE_MAX)
    young = [number for number in _arrivals(ordered) if number > 2]
    assert _arrivals(aged_first(ordered, came_by=2.0)) == [1, 2, *young]
    assert _arrivals(aged_first(ordered, came_by=0.5)) == _arrivals(ordered)


@pytest.mark.parametrize("policy", QUEUE_POLICIES)
def test_ordering_neither_locks_nor_changes_what_eviction_takes_next(policy: QueuePolicy) -> None:
    cache = new_cache()
    insert(cache, "abc")
    insert(cache, "p")
    _order(policy, _waiting(), cache)
    check(cache)
    assert cache.locks == 0
    cache.evict(3)
    assert (cached(cache, "abc"), cached(cache, "p")) == (0, 1)


def test_lpm_leaves_a_token_to_compute_and_so_ranks_a_full_hit_by_one_page_less() -> None:
    cache = new_cache()
    insert(cache, "ab")
    insert(cache, "xy")
    assert _order("lpm", [request("ab", 1), request("xyz", 2)], cache) == [2, 1]


def test_dfs_weight_takes_the_fullest_subtree_first_and_keeps_it_together() -> None:
    cache = new_cache()
    for names in ("a", "bc", "bd"):
        insert(cache, names)
    waiting = [
        request("a1", 1),
        request("bc1", 2),
        request("bd1", 3),
        request("b1", 4),
        request("bd2", 5),
        request("zz", 6),
        request("a2", 7),
    ]
    assert _order("dfs-weight", waiting, cache) == [3, 5, 2, 4, 1, 7, 6]


def test_dfs_weight_copes_with_a_deep_tree() -> None:
    cache = new_cache(pages=3000)
    letters = "".join(chr(0x4E00 + i) for i in range(2500))
    for end in range(100, 2501, 100):
        insert(cache, letters[:end])
    waiting = [request(letters[:end] + "z", end) for end in range(100, 2501, 100)]
    assert _order("dfs-weight", waiting, cache)[0] == 2500


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
@pytest.mark.parametrize(
    ("waiting", "aware"),
    [
        pytest.param(QUEUE_MAX, True, id="a queue at the bound is looked up"),
        pytest.param(QUEUE_MAX + 1, False, id="a longer one goes by arrival"),
    ],
)
def test_a_long_queue_is_not_looked_up_in_the_cache(policy: QueuePolicy, waiting: int, aware: bool) -> None:
    cache = new_cache()
    insert(cache, "a")
    hit_last = [request("az" if i == waiting - 1 else "xz", i) for i in range(waiting)]
    order = _order(policy, hit_last, cache)
    assert (order[0] == waiting - 1) is aware
    assert (order == list(range(waiting))) is not aware


def test_random_draws_anew_with_every_arrival_so_no_request_is_always_last() -> None:
    firsts = {_order("random", [request("a", i) for i in range(newest + 1)])[0] for newest in range(40)}
    assert len(firsts) > 10
    assert _order("random", [request("a", i) for i in range(40)]) != list(range(40))


def test_routing_key_favours_the_key_that_most_running_requests_share() -> None:
    running = [request("x", 10 + i, extra_key=key) for i, key in enumerate(["m", "n", "n"])]
    waiting = [request("a", i, extra_key=key) for i, key in enumerate(["new", "m", "n", "m", "n"])]
    ordered = order_waiting("routing-key", waiting, new_cache(), running, prefix_aware_queue_max=QUEUE_MAX)
    assert _arrivals(ordered) == [2, 4, 1, 3, 0]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'sjf'"):
        _order("sjf", [])  # type: ignore[arg-type]


# ---- in-batch prefix caching ----


def _in_batch(cache: RadixCache, cached_pages: int = 2, shared_pages: int = 2) -> InBatchPrefix:
    cached, shared = cached_pages * PAGE, shared_pages * PAGE
    return InBatchPrefix(cache, cached_tokens_max=cached, shared_tokens_min=shared, queue_max=QUEUE_MAX)


@pytest.mark.parametrize(
    ("first", "second", "put_off"),
    [
        pytest.param("abc", "abd", True, id="a shared prefix of the least length"),
        pytest.param("abcdx", "abcdy", True, id="a longer shared prefix"),
        pytest.param("abc", "abc", True, id="the same prompt"),
        pytest.param("abc", "axc", False, id="too short a shared prefix"),
        pytest.param("xab", "yab", False, id="shared tokens that are no prefix"),
        pytest.param("a", "a", False, id="prompts shorter than the least length"),
    ],
)
def test_the_second_of_two_with_a_common_prefix_waits_for_the_first(
    first: str, second: str, put_off: bool
) -> None:
    now = _in_batch(new_cache()).go_now([request(first, 1), request(second, 2)])
    assert _arrivals(now) == ([1] if put_off else [1, 2])


def test_a_shared_prefix_in_another_namespace_is_none() -> None:
    now = _in_batch(new_cache()).go_now([request("ab", 1), request("ab", 2, extra_key="tenant")])
    assert _arrivals(now) == [1, 2]


@pytest.mark.parametrize(
    ("pages", "put_off"),
    [
        pytest.param(2, True, id="as much as the bound is little"),
        pytest.param(3, False, id="more than the bound"),
    ],
)
def test_a_request_with_much_of_its_prefix_cached_does_not_wait(pages: int, put_off: bool) -> None:
    cache = new_cache()
    insert(cache, "abcdef"[:pages])
    now = _in_batch(cache).go_now([request("abcdefg", 1), request("abcdefh", 2)])
    assert _arrivals(now) == ([1] if put_off else [1, 2])


def test_a_request_is_put_off_for_one_round_only() -> None:
    in_batch = _in_batch(new_cache())
    waiting = [request("abc", arrival) for arrival in (1, 2, 3)]
    assert _arrivals(in_batch.go_now(waiting)) == [1]
    assert _arrivals(in_batch.go_now(waiting)) == [1, 2, 3]  # the first found no room, say
    assert _arrivals(in_batch.go_now(waiting)) == [1, 2, 3]


def test_one_that_comes_later_waits_for_those_that_waited_before() -> None:
    in_batch = _in_batch(new_cache())
    in_batch.go_now([request("abc", 1), request("abd", 2)])
    assert _arrivals(in_batch.go_now([request("abd", 2), request("abe", 3)])) == [2]


def test_a_page_is_the_least_that_sharing_is_worth() -> None:
    in_batch = InBatchPrefix(new_cache(), cached_tokens_max=0, shared_tokens_min=1, queue_max=QUEUE_MAX)
    short_of_a_page = [request([1, 2, 3, 9], 1), request([1, 2, 3, 8], 2)]
    assert _arrivals(in_batch.go_now(short_of_a_page)) == [1, 2]
    assert _arrivals(in_batch.go_now([request([1, 2, 3, 9], 3), request([1, 2, 3, 9], 4)])) == [3]


@pytest.mark.parametrize(("queue_max", "first_tried"), [(1, [1, 2]), (2, [1])])
def test_requests_behind_the_bound_of_the_queue_are_not_compared(
    queue_max: int, first_tried: list[int]
) -> None:
    in_batch = InBatchPrefix(new_cache(), cached_tokens_max=0, shared_tokens_min=PAGE, queue_max=queue_max)
    assert _arrivals(in_batch.go_now([request("ab", 1), request("ab", 2)])) == first_tried


def test_the_order_is_kept() -> None:
    waiting = [request("xy", 5), request("ab", 3), request("xy", 4), request("cd", 1)]
    assert _arrivals(_in_batch(new_cache()).go_now(waiting)) == [5, 3, 1]

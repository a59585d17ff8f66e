"""Turns among tenants are fair in tokens, and nobody's past is held against others for ever."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import pytest

from router.core.requests.request_queue import TENANTS_MAX, VirtualTime


def served(clock: VirtualTime, waiting: list[tuple[float, int, str]]) -> str:
    """The tenant of the request that goes next."""
    start, _, tenant = heapq.heappop(waiting)
    clock.serve(start)
    return tenant


def test_a_tenant_that_comes_new_goes_before_all_that_another_has_waiting() -> None:
    clock = VirtualTime()
    waiting = [(clock.start("greedy", 100), number, "greedy") for number in range(50)]
    heapq.heapify(waiting)
    assert [served(clock, waiting) for _ in range(3)] == ["greedy"] * 3
    heapq.heappush(waiting, (clock.start("new", 100), 99, "new"))
    assert "new" in [served(clock, waiting) for _ in range(2)]


@pytest.mark.parametrize(("weight", "costs"), [(1.0, (1, 10)), (3.0, (7, 5)), (0.5, (100, 1))])
def test_tenants_that_always_wait_get_tokens_in_proportion_to_their_weights(
    weight: float, costs: tuple[int, int]
) -> None:
    clock, rng = VirtualTime(), random.Random(1)
    weights, most = {"a": 1.0, "b": weight}, dict(zip("ab", costs, strict=True))
    waiting: list[tuple[float, int, str]] = []
    queued: Counter[tuple[str, int]] = Counter()
    tokens: Counter[str] = Counter()
    for number in range(2000):
        tenant = "ab"[number % 2]
        cost = rng.randint(1, most[tenant])
        queued[tenant, number] = cost
        heapq.heappush(waiting, (clock.start(tenant, cost / weights[tenant]), number, tenant))
    while {tenant for _, _, tenant in waiting} == {"a", "b"}:
        start, number, tenant = heapq.heappop(waiting)
        clock.serve(start)
        tokens[tenant] += queued[tenant, number]
        apart = abs(tokens["a"] / weights["a"] - tokens["b"] / weights["b"])
        assert apart <= most["a"] / weights["a"] + most["b"] / weights["b"]


def test_requests_of_one_tenant_go_in_the_order_they_came_also_after_some_hung_up() -> None:
    clock = VirtualTime()
    starts = [clock.start("a", 10) for _ in range(3)]
    clock.give_back("a", 10)
    clock.give_back("a", 10)
    starts.append(clock.start("a", 10))
    assert starts == sorted(starts)


def test_what_a_tenant_did_not_need_brings_its_next_request_forward() -> None:
    clock = VirtualTime()
    clock.start("a", 1000)
    clock.give_back("a", 990)
    assert clock.start("a", 1) == 10


def test_tenants_are_equal_and_forgotten_once_nobody_waits() -> None:
    clock = VirtualTime()
    first = clock.start("a", 1000)
    clock.serve(first)
    clock.rest()
    assert len(clock) == 0
    assert clock.start("a", 1) == clock.start("b", 1) > first


def test_the_tenants_remembered_are_bounded() -> None:
    clock = VirtualTime()
    for number in range(TENANTS_MAX + 10):
        clock.start(f"tenant {number}", 1)
    assert len(clock) == TENANTS_MAX

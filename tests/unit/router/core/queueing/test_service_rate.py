"""The rate at which a queue is served: only waiting counts, and what is old is forgotten."""

from __future__ import annotations

import pytest

from router.core.queueing.backpressure import FORGOTTEN_SECONDS, TAKES_MIN, ServiceRate


def served(rate: ServiceRate, since: float, seconds: float, per_second: int) -> float:
    """Requests find no room from `since` on, and are taken one by one; returns when that ends."""
    rate.passed(0, True, since)
    for number in range(1, round(seconds * per_second) + 1):
        rate.passed(1, True, since + number / per_second)
    return since + seconds


def test_the_rate_is_what_was_taken_while_others_waited() -> None:
    rate = ServiceRate()
    now = served(rate, 0.0, 10.0, 8)
    assert rate.per_second(now, patience=1.0) == pytest.approx(8, rel=0.05)


def test_time_in_which_nobody_waits_does_not_count() -> None:
    rate = ServiceRate()
    now = served(rate, 0.0, 5.0, 8)
    rate.passed(1, False, now)
    rate.passed(40, False, now + 30.0)
    now = served(rate, now + 31.0, 5.0, 8)
    assert rate.per_second(now, patience=1.0) == pytest.approx(8, rel=0.05)


def test_a_short_wait_before_each_take_shows_the_rate_of_the_waits() -> None:
    rate, now = ServiceRate(), 0.0
    for _ in range(100):
        rate.passed(0, True, now)
        rate.passed(1, False, now + 0.1)
        now += 1.0
    assert rate.per_second(now, patience=1.0) == pytest.approx(10, rel=0.05)


def test_the_rate_is_not_known_before_some_were_taken_or_patience_has_ended() -> None:
    rate = ServiceRate()
    rate.passed(0, True, 0.0)
    assert rate.per_second(1.9, patience=2.0) is None
    assert rate.per_second(2.0, patience=2.0) == 0.0
    rate.passed(TAKES_MIN, True, 1.0)
    assert rate.per_second(1.0, patience=2.0) == TAKES_MIN


def test_the_rate_follows_a_fleet_that_grows_or_shrinks() -> None:
    rate = ServiceRate()
    now = served(rate, 0.0, 60.0, 20)
    now = served(rate, now, 25.0, 80)
    assert rate.per_second(now, patience=1.0) == pytest.approx(80, rel=0.1)
    now = served(rate, now, 25.0, 10)
    assert rate.per_second(now, patience=1.0) == pytest.approx(10, rel=0.1)


def test_bursts_and_lulls_of_seconds_do_not_change_the_rate() -> None:
    """Five a second: nothing for 3.6 s, then 24 in 1.2 s."""
    rate, now, seen = ServiceRate(), 0.0, list[float]()
    rate.passed(0, True, now)
    for _ in range(20):
        now += 3.6
        seen.append(rate.per_second(now, patience=1.0) or 0.0)
        for _ in range(24):
            now += 0.05
            rate.passed(1, True, now)
        seen.append(rate.per_second(now, patience=1.0) or 0.0)
    assert min(seen[12:]) > 4.6
    assert max(seen[12:]) < 5.8


def test_a_take_that_is_given_back_does_not_count() -> None:
    rate = ServiceRate()
    rate.passed(0, True, 0.0)
    for second in range(1, 41):
        rate.passed(2, True, float(second))
        rate.give_back()
    assert rate.per_second(40.0, patience=1.0) == pytest.approx(1, rel=0.05)


def test_a_rate_of_long_ago_is_forgotten() -> None:
    rate = ServiceRate()
    now = served(rate, 0.0, 10.0, 8)
    rate.passed(1, False, now)
    rate.passed(0, True, now + FORGOTTEN_SECONDS + 1)
    assert rate.per_second(now + FORGOTTEN_SECONDS + 1.5, patience=1.0) is None


def test_a_queue_that_is_never_served_costs_no_memory() -> None:
    rate = ServiceRate()
    for number in range(10_000):
        rate.passed(0, True, float(number))
    assert rate.per_second(10_000.0, patience=1.0) == 0.0
    assert len(rate._marks) == 1

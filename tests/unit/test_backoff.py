"""The wait before the next try doubles with each failure, up to a bound."""

from __future__ import annotations

from shared.primitives.backoff import backoff_seconds


def test_the_wait_doubles_with_each_failure_up_to_the_bound() -> None:
    assert [backoff_seconds(failures, 0.5, 5.0) for failures in range(1, 7)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_without_a_failure_the_wait_is_the_first() -> None:
    assert backoff_seconds(0, 0.5, 5.0) == 0.5


def test_any_number_of_failures_has_a_wait() -> None:
    assert backoff_seconds(10**9, 0.5, 5.0) == 5.0

"""Waits double from the first to the limit and stay there."""

from __future__ import annotations

from shared.backoff import backoff_seconds


def test_waits_double_from_the_first_to_the_limit() -> None:
    waits = [backoff_seconds(failures, 0.1, 2.0) for failures in range(1, 8)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_a_peer_that_is_away_for_months_is_still_tried_at_the_limit() -> None:
    assert backoff_seconds(10_000_000, 0.1, 2.0) == 2.0

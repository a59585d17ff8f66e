"""The wait before the next try doubles with each failure, up to a bound."""

from __future__ import annotations

from shared.primitives.backoff import backoff_seconds
from shared.primitives.tally import CAUSES_MAX, Tally


def test_the_wait_doubles_with_each_failure_up_to_the_bound() -> None:
    assert [backoff_seconds(failures, 0.5, 5.0) for failures in range(1, 7)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_without_a_failure_the_wait_is_the_first() -> None:
    assert backoff_seconds(0, 0.5, 5.0) == 0.5


def test_any_number_of_failures_has_a_wait() -> None:
    assert backoff_seconds(10**9, 0.5, 5.0) == 5.0


# ---- counting what strangers can cause without end -------------------------------------------------------------------


def test_the_1st_2nd_4th_and_8th_time_deserve_a_line() -> None:
    tally = Tally()
    assert [tally.add("a") for _ in range(9)] == [1, 2, 0, 4, 0, 0, 0, 8, 0]
    assert tally.add("b") == 1


def test_the_causes_that_are_told_apart_are_bounded() -> None:
    tally = Tally()
    assert {tally.add(str(cause)) for cause in range(CAUSES_MAX)} == {1}
    assert [tally.add(f"new {cause}") for cause in range(4)] == [1, 2, 0, 4], "they are counted together"
    assert tally.add("0") == 2
    assert len(tally._times) == CAUSES_MAX + 1

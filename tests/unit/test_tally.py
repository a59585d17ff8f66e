"""Counting what strangers can cause without end."""

from __future__ import annotations

from shared.primitives.tally import CAUSES_MAX, Tally


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

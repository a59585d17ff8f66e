"""What the lengths of outputs that have ended say of those that run."""

from __future__ import annotations

import pytest

from shared.scheduling.output_lengths import OUTPUTS_REMEMBERED, SEEN_MIN, OutputLengths


def after(*lengths: int, at_bound: bool = False) -> OutputLengths:
    seen = OutputLengths()
    for length in lengths:
        seen.add(length, at_bound=at_bound)
    return seen


def test_nothing_is_known_until_enough_outputs_have_ended() -> None:
    assert not after(*[100] * (SEEN_MIN - 1)).known
    assert after(*[100] * SEEN_MIN).known


def test_outputs_of_like_length_all_come_near_it_and_none_much_beyond() -> None:
    seen = after(*[150] * 50)
    assert seen.share_reaching(128) == 1.0
    assert seen.share_reaching(160) == 0.0


def test_half_short_and_half_long_outputs_are_told_apart_by_those_that_outlive_the_short() -> None:
    seen = after(*[20, 1000] * 50)
    assert seen.share_reaching(24) == pytest.approx(0.5)
    assert seen.share_reaching(890) == pytest.approx(0.5)
    assert seen.share_reaching(1024) == 0.0


def test_an_output_that_ended_at_its_bound_does_not_say_where_others_end() -> None:
    seen = after(*[16] * 50, at_bound=True)
    for _ in range(10):
        seen.add(500, at_bound=False)
    assert seen.share_reaching(400) == 1.0


def test_old_outputs_are_forgotten() -> None:
    seen = after(*[2000] * OUTPUTS_REMEMBERED)
    for _ in range(8 * OUTPUTS_REMEMBERED):
        seen.add(50, at_bound=False)
    assert seen.share_reaching(100) < 0.01


def test_an_output_longer_than_any_context_is_counted_all_the_same() -> None:
    seen = after(*[1 << 22] * SEEN_MIN)
    assert seen.share_reaching(1000) == 1.0
    assert seen.share_reaching(1 << 23) == 0.0

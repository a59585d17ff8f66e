"""A grammar that takes too long ends its own request, and no other's; a step waits for one call at most."""

from __future__ import annotations

import math
from itertools import cycle

import pytest

from shared.engine.sampling.grammars import SLOW_SECONDS_MAX, TOO_SLOW, TimedMatcher


class Sound:
    """A matcher that allows everything; its calls take the given seconds of its own clock, one after the other."""

    def __init__(self, *seconds: float):
        self.now = 0.0
        self.taken: list[int] = []
        self.masks = 0
        self._seconds = cycle(seconds)

    def clock(self) -> float:
        return self.now

    def consume_token(self, sampled_token: int) -> bool:
        self.now += next(self._seconds)
        self.taken.append(sampled_token)
        return True

    def compute_bitmask(self) -> bytes:
        self.now += next(self._seconds)
        self.masks += 1
        return b"\xff"

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("seconds", "tokens", "ended"), [(0.0009, 5000, False), (0.051, 4, False), (0.051, 6, True)]
)
def test_it_is_in_error_when_its_slow_calls_have_taken_too_much_together(
    seconds: float, tokens: int, ended: bool
) -> None:
    sound = Sound(seconds)
    matcher = TimedMatcher(sound, (), sound.clock)
    for token in range(tokens):
        assert matcher.mask() is not None
        matcher.take(token)
    assert (matcher.is_error(), matcher.get_error()) == (ended, TOO_SLOW if ended else "")


def test_what_another_matcher_was_charged_for_is_not_charged_again() -> None:
    sound = Sound(0.1)
    matcher = TimedMatcher(sound, range(50), sound.clock)
    assert matcher.mask() == b"\xff"
    assert sound.now > 5 > SLOW_SECONDS_MAX
    assert not matcher.is_error()


def test_a_token_costs_nothing_before_the_next_mask_is_asked_for() -> None:
    sound = Sound(0.1)
    matcher = TimedMatcher(sound, (), sound.clock)
    matcher.take(7)
    assert (sound.now, sound.taken) == (0, [])
    assert matcher.mask() == b"\xff"
    assert sound.taken == [7]


def test_it_goes_on_where_the_time_was_over_and_makes_one_call_at_least() -> None:
    sound = Sound(0.004)
    matcher = TimedMatcher(sound, range(5), sound.clock)
    spent = []
    while (began := sound.now, matcher.mask(0.005))[1] is None:
        spent.append(sound.now - began)
    assert spent == pytest.approx([0.008, 0.008])
    assert (sound.taken, sound.masks) == ([0, 1, 2, 3, 4], 1)
    matcher.take(5)
    assert matcher.mask(0.0) is None
    assert matcher.mask(0.0) == b"\xff"
    assert sound.taken == [0, 1, 2, 3, 4, 5]


def test_without_a_bound_all_is_done_at_once() -> None:
    sound = Sound(0.3)
    assert TimedMatcher(sound, range(9), sound.clock).mask(math.inf) == b"\xff"
    assert len(sound.taken) == 9

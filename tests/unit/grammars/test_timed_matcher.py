"""A grammar that takes too long ends its own request, and no other's."""

from __future__ import annotations

from itertools import accumulate

import pytest

from shared.engine.timed_matcher import TOO_SLOW, TimedMatcher


class Sound:
    """A matcher that allows everything."""

    def consume_token(self, sampled_token: int) -> bool:
        return sampled_token >= 0

    def compute_bitmask(self) -> bytes:
        return b"\xff"

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""


def timed(seconds: list[float]) -> TimedMatcher:
    """One whose calls take so long."""
    readings = accumulate(step for one in seconds for step in (0.0, one))
    return TimedMatcher(Sound(), lambda: next(readings))


@pytest.mark.parametrize(
    ("seconds", "ended"), [([0.009] * 1000, False), ([0.06] * 9, False), ([0.06] * 11, True)]
)
def test_it_is_in_error_when_its_slow_calls_have_taken_too_much_together(
    seconds: list[float], ended: bool
) -> None:
    matcher = timed(seconds)
    for at in range(len(seconds)):
        assert matcher.compute_bitmask() == b"\xff" if at % 2 else matcher.consume_token(1)
    assert (matcher.is_error(), matcher.get_error()) == (ended, TOO_SLOW if ended else "")

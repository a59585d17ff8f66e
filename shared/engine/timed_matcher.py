"""A matcher that ends its request once it has cost the computing thread too much.

The library's limits bound a step, but what an ambiguous grammar (`s: s s | "a"`) costs grows with the answer: 4 ms a
token after 200 of them, half a second after 1,000. Other requests wait for that on the same thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shared.engine.constraints import Matcher

FREE_SECONDS = 0.01  # of each call; of 2,891 tokens of a schema with 400 properties few take more
SLOW_SECONDS_MAX = 0.5  # beyond that, of all calls together
TOO_SLOW = "the grammar became too slow to follow: it is ambiguous, or allows too much at once"


class TimedMatcher:
    """Asks another matcher, and is in error when that has taken too much of its thread's time."""

    def __init__(self, matcher: Matcher, clock: Callable[[], float] = time.thread_time):
        self._matcher = matcher
        self._clock = clock
        self._slow_seconds = 0.0

    def consume_token(self, sampled_token: int) -> bool:
        """Take the next token; False if it is not allowed."""
        began_at = self._clock()
        taken = self._matcher.consume_token(sampled_token)
        self._charge(began_at)
        return taken

    def compute_bitmask(self) -> bytes:
        """A bit for each token that may come next."""
        began_at = self._clock()
        bits = self._matcher.compute_bitmask()
        self._charge(began_at)
        return bits

    def is_error(self) -> bool:
        """Whether nothing may follow any more."""
        return self._slow_seconds > SLOW_SECONDS_MAX or self._matcher.is_error()

    def get_error(self) -> str:
        """Why; empty if it is sound."""
        return TOO_SLOW if self._slow_seconds > SLOW_SECONDS_MAX else self._matcher.get_error()

    def _charge(self, began_at: float) -> None:
        self._slow_seconds += max(0.0, self._clock() - began_at - FREE_SECONDS)

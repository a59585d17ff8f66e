"""A matcher that knows what it costs, works in portions, and ends its request once it has cost too much.

The library's limits bound each call, to some 50 ms. But what an ambiguous grammar (`s: s s | "a"`) costs grows with the
answer, and other requests wait for it on the same thread. So tokens are taken late, when the next mask is asked for,
and one call at a time: between two calls a step may say that its time is over. The next step then goes on from there.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

FREE_SECONDS = 0.004  # of each call; a schema of 500 optional properties takes half of it a token
SLOW_SECONDS_MAX = 0.5  # beyond that, of all calls for new tokens together
TOO_SLOW = "the grammar became too slow to follow: it is ambiguous, or allows too much at once"

Clock = Callable[[], float]  # seconds


class Matcher(Protocol):
    """A grammar on its way, as llguidance's `LLMatcher` is."""

    def consume_token(self, sampled_token: int) -> bool: ...
    def compute_bitmask(self) -> bytes: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...


class TimedMatcher:
    """Asks another matcher, and is in error when that has taken too much of its thread's time."""

    def __init__(self, matcher: Matcher, output: Iterable[int] = (), clock: Clock = time.thread_time):
        """`matcher` is at the start of its grammar, and `output` the request's own so far."""
        self._matcher = matcher
        self._clock = clock
        self._slow_seconds = 0.0
        self._behind = deque(output)  # tokens that the matcher has yet to take
        self._replayed = len(self._behind)  # of these: another matcher took them before, and was charged

    def take(self, token_id: int) -> None:
        """The next token is known. Costs nothing before the next mask is asked for."""
        self._behind.append(token_id)

    def mask(self, seconds: float = math.inf) -> bytes | None:
        """A bit for each token that may come next; None if `seconds` are over before it is known.

        At least one call is made. In error, the bits mean nothing.
        """
        began_at = self._clock()
        while self._behind and not self.is_error():
            called_at = self._clock()
            self._matcher.consume_token(self._behind.popleft())
            if self._replayed:
                self._replayed -= 1
            else:
                self._charge(called_at)
            if self._clock() - began_at >= seconds:
                return None
        if self.is_error():
            return b""
        called_at = self._clock()
        bits = self._matcher.compute_bitmask()
        self._charge(called_at)
        return bits

    def is_error(self) -> bool:
        """Whether nothing may follow any more."""
        return self._slow_seconds > SLOW_SECONDS_MAX or self._matcher.is_error()

    def get_error(self) -> str:
        """Why; empty if it is sound."""
        return TOO_SLOW if self._slow_seconds > SLOW_SECONDS_MAX else self._matcher.get_error()

    def _charge(self, called_at: float) -> None:
        self._slow_seconds += max(0.0, self._clock() - called_at - FREE_SECONDS)

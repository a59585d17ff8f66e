"""A bucket of tokens: what flows in at a steady rate may be spent at once, up to a minute's worth.

The level may fall below zero, because the length of an output is known only when it has come. Nothing more is granted
until the debt is repaid. It knows neither requests nor clocks.
"""

from __future__ import annotations

import math


class TokenBucket:
    """`per_minute` tokens flow in each minute; it starts full. Times are in seconds and never decrease."""

    def __init__(self, per_minute: float, now: float):
        self.per_minute = float(per_minute)
        self._level = self.per_minute
        self._at = now

    def resize(self, per_minute: float, now: float) -> None:
        """From now on another rate; what is in the bucket stays, up to what it holds now."""
        if per_minute != self.per_minute:
            self._refill(now)
            self.per_minute = float(per_minute)
            self._refill(now)

    def level(self, now: float) -> float:
        """Tokens that are there; below 0: a debt."""
        self._refill(now)
        return self._level

    def seconds_until_full(self, now: float) -> float:
        """Seconds until it is as at its start, if nothing is spent."""
        return self.seconds_until(math.ceil(self.per_minute), now)

    def take(self, tokens: int, now: float) -> None:
        """Spend tokens, whether they are there or not."""
        self._refill(now)
        self._level -= tokens

    def seconds_until(self, tokens: int, now: float) -> float:
        """Seconds until `tokens` are there, 0.0 if they are now. More than the bucket holds means: until it is full."""
        self._refill(now)
        return max(0.0, (min(tokens, self.per_minute) - self._level) * 60.0 / self.per_minute)

    def full(self, now: float) -> bool:
        """Whether it is as at its start, so that it need not be remembered."""
        self._refill(now)
        return self._level >= self.per_minute

    def _refill(self, now: float) -> None:
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60.0)
        self._at = now

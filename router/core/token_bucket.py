"""A bucket of tokens: what flows in at a steady rate may be spent at once, up to a minute's worth.

The level may fall below zero, because the length of an output is known only when it has come. Nothing more is granted
until the debt is repaid. It knows neither requests nor clocks.
"""

from __future__ import annotations


class TokenBucket:
    """`per_minute` tokens flow in each minute; it starts full. Times are in seconds and never decrease."""

    def __init__(self, per_minute: int, now: float):
        self._capacity = float(per_minute)
        self._per_second = per_minute / 60.0
        self._level = self._capacity
        self._at = now

    def take(self, tokens: int, now: float) -> None:
        """Spend tokens, whether they are there or not."""
        self._refill(now)
        self._level -= tokens

    def seconds_until(self, tokens: int, now: float) -> float:
        """Seconds until `tokens` are there, 0.0 if they are now. More than the bucket holds means: until it is full."""
        self._refill(now)
        return max(0.0, (min(tokens, self._capacity) - self._level) / self._per_second)

    def full(self, now: float) -> bool:
        """Whether it is as at its start, so that it need not be remembered."""
        self._refill(now)
        return self._level >= self._capacity

    def _refill(self, now: float) -> None:
        self._level = min(self._capacity, self._level + (now - self._at) * self._per_second)
        self._at = now

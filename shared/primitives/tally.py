"""Counts what strangers can cause without end, so that no log fills: the 1st, 2nd, 4th, 8th … time is a line."""

from __future__ import annotations

from collections import Counter

CAUSES_MAX = 256  # causes come from code, not from clients; this bounds a mistake
OTHER = "other"


def is_worth_a_line(times: int) -> bool:
    """Whether the event that occurred for the `times`-th time is logged: the 1st, 2nd, 4th, 8th … is."""
    return times & (times - 1) == 0


class Tally:
    """How often each cause has occurred."""

    def __init__(self) -> None:
        self._times: Counter[str] = Counter()

    def add(self, cause: str) -> int:
        """How often it has occurred, now included, if that deserves a line; else 0."""
        if cause not in self._times and len(self._times) >= CAUSES_MAX:
            cause = OTHER
        self._times[cause] += 1
        times = self._times[cause]
        return times if is_worth_a_line(times) else 0

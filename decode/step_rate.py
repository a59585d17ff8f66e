"""How many decode steps fit in a time, by the steps of late.

It knows the times at which steps were planned, nothing of what they hold.
"""

from __future__ import annotations

import math
from collections import deque

STEPS_MEASURED = 32  # the last ones; a pause among them makes the rate too low for as many steps


class StepRate:
    """The rate of the last `STEPS_MEASURED` steps."""

    def __init__(self) -> None:
        self._planned_at: deque[float] = deque(maxlen=STEPS_MEASURED + 1)  # seconds

    def on_step(self, now: float) -> None:
        """A step is planned."""
        self._planned_at.append(now)

    def steps_within(self, seconds: float, most: int) -> int:
        """Steps that fit in `seconds`, and no more than `most`; that many until two steps have been seen."""
        steps = len(self._planned_at) - 1
        if steps < 1 or self._planned_at[-1] <= self._planned_at[0]:
            return most
        return min(most, math.ceil(seconds * steps / (self._planned_at[-1] - self._planned_at[0])))

"""Whether the loop of a process still gets on, as threads beside it see it: its links, and its probes.

Links and probes have threads of their own, so a process whose loop hangs in a step, a kernel or a read looks well from
outside, while its streams stand still. A worker's links therefore end their sessions when its loop hangs:

    loop    turn ── turn ── turn ─ ─ ─ hangs ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ turn: hears of the ends, gives up their requests
    links   session ─────────────── step_seconds_max ── end, refuse ──── accept again

To a router this is the loss of a worker, as a freeze is: the streams continue elsewhere. What the loop sends after the
hang belongs to a session that is over and goes nowhere.

A long step is no hang: the device counts the layers that it has computed, and each counts as a turn. Knows no clock and
no thread; all times are seconds of one clock. `turned` is called by the loop's thread, `hangs` by one other thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class LoopWatch:
    """Before its first turn a loop is not judged: its process starts.

    `work_done` gives a number that changes while the device computes. It is looked at whenever `hangs` is asked.
    """

    def __init__(self, seconds_max: float, work_done: Callable[[], int] = lambda: 0):
        self.seconds_max = seconds_max
        self.work_done = work_done
        self._turned_at = math.inf
        self._seen_done = 0

    def turned(self, now: float) -> None:
        """The loop begins a turn."""
        self._turned_at = now

    @property
    def deadline(self) -> float:
        """When the loop hangs, unless it gets on before."""
        return self._turned_at + self.seconds_max

    def seconds_since(self, now: float) -> float:
        """Seconds since the loop last turned, or got on as `hangs` has seen it; 0.0 before the first turn."""
        return max(0.0, now - self._turned_at)

    def hangs(self, now: float) -> bool:
        """Whether the last turn, and the last layer, was too long ago."""
        done = self.work_done()
        if done != self._seen_done and self._turned_at <= now:
            self._seen_done, self._turned_at = done, now
        return now >= self.deadline

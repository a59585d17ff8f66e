"""Whether the loop behind a worker's links still turns.

Links have a thread of their own, so a worker whose loop hangs in a step, a kernel or a read still sends heartbeats and
looks well, while its streams stand still. So the links watch the loop, and end their sessions when it hangs:

    loop    turn ── turn ── turn ─ ─ ─ hangs ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ turn: hears of the ends, gives up their requests
    links   session ─────────────── step_seconds_max ── end, refuse ──── accept again

To a router this is the loss of a worker, as a freeze is: the streams continue elsewhere. What the loop sends after the
hang belongs to a session that is over and goes nowhere. Knows no clock and no thread; all times are seconds of one
clock. `turned` is called by the loop's thread, everything else by the links' thread.
"""

from __future__ import annotations

import math


class LoopWatch:
    """Before its first turn a loop is not judged: its process starts."""

    def __init__(self, step_seconds_max: float):
        self.step_seconds_max = step_seconds_max
        self._turned_at = math.inf

    def turned(self, now: float) -> None:
        """The loop begins a turn."""
        self._turned_at = now

    @property
    def deadline(self) -> float:
        """When the loop hangs, unless it turns before."""
        return self._turned_at + self.step_seconds_max

    def hangs(self, now: float) -> bool:
        """Whether the last turn began too long ago."""
        return now >= self.deadline

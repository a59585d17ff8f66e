"""When the API server is asked for EndpointSlices: which step is next, a list, a watch or a pause.

    list --> watch --> watch --> … --> list --> …      a full list every `relist_seconds`
      ^        |
      '-pause--'  failed, or ended before its time

A new list follows whatever went wrong, since a watch that broke may have missed events. Pauses between attempts that
fail double up to `PAUSE_SECONDS_MAX`. A watch that lasted `WORKING_SECONDS` was a good one, however it ended: after it
the pauses begin anew. Knows no clock, thread or I/O: the thread that asks is in `kubernetes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.primitives.backoff import backoff_seconds

PAUSE_SECONDS = 0.1
PAUSE_SECONDS_MAX = 5.0  # an API server that was away is asked again at most this long after its return
WORKING_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How often there is a full list, and how long one watch lasts at most."""

    relist_seconds: float
    watch_read_seconds: float


@dataclass(frozen=True, slots=True)
class ListSlices:
    """Ask for all slices."""


@dataclass(frozen=True, slots=True)
class WatchSlices:
    """Follow the changes since the last list or watch, for this many seconds."""

    seconds: int


Step = ListSlices | WatchSlices


class Polling:
    """Decides the steps of one thread. `now` in seconds, of any steady clock."""

    def __init__(self, pace: Pace):
        self._pace = pace
        self._relist_at = -math.inf
        self._failures = 0  # in a row

    def next_step(self, now: float) -> Step:
        """What to ask now."""
        rest_seconds = self._relist_at - now
        if rest_seconds <= 0:
            return ListSlices()
        return WatchSlices(math.ceil(min(rest_seconds, self._pace.watch_read_seconds)))

    def ended(self, step: Step, began: float, now: float, *, failed: bool) -> float:
        """Take in how a step ended; returns the seconds to pause before the next one, 0 for none."""
        if isinstance(step, WatchSlices):
            if now - began >= WORKING_SECONDS:
                self._failures = 0
            failed = failed or now - began < WORKING_SECONDS / 2
        elif not failed:
            self._relist_at = now + self._pace.relist_seconds
        if not failed:
            return 0.0
        self._relist_at = -math.inf
        self._failures += 1
        return backoff_seconds(self._failures, PAUSE_SECONDS, PAUSE_SECONDS_MAX)

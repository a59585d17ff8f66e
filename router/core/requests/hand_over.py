"""The gap between the first and the second token of a request that changes from prefill to decode, in four parts.

    first token ── queue ──► sent to decode ── fetch ──► pages there ── joining ──► in a step ── first_step ──► second

`queue` and the sum are by the router's own clock. `fetch` is what the decode worker measured. `first_step` is what the
worker last told that a step takes, 0 if it told nothing: it reports no single one. `joining` is what is left: messages,
the wait for another request that fetches the same prefix, and those for the worker's next turn and the steps under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.core.counters import GapPart


@dataclass(slots=True)
class HandOver:
    """One hand-over between two tokens; seconds of the router's clock."""

    first_at: float  # when the first token was delivered
    sent_at: float
    fetch_seconds: float | None = None  # None: the pages are not there yet

    def parts(self, second_at: float, step_seconds: float) -> Mapping[GapPart, float] | None:
        """The parts, whose sum is the gap; None if the worker never said that it has the pages."""
        if self.fetch_seconds is None:
            return None
        left = second_at - self.sent_at
        fetch = min(self.fetch_seconds, left)
        step = min(step_seconds, left - fetch)
        return {
            "queue": self.sent_at - self.first_at,
            "fetch": fetch,
            "joining": left - fetch - step,
            "first_step": step,
        }

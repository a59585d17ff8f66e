"""What the router core has counted and measured; plain numbers that the shell publishes and tests read.

Every key is one of a few words of this program: none comes from a client, so each dict is bounded.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

OBSERVATIONS_MAX = 65536  # the shell drains them after every input; a bound in case it does not


def _from_zero(*keys: str) -> Callable[[], Counter[str]]:
    """Keys that are shown before they first occur, so that a rate sees their first step."""
    return lambda: Counter(dict.fromkeys(keys, 0))


@dataclass(slots=True)
class RouterCounters:
    """Totals since the start.

    Observations are (name, seconds): queue_seconds (arrival to first placement), ttft_seconds, itl_seconds (one a
    token), ready_seconds (first token to decode), fetch_seconds, prefill_queue_seconds, prefill_compute_seconds,
    request_seconds (arrival to end).
    """

    requests: Counter[str] = field(default_factory=Counter)  # by outcome: length, stop, aborted, 429, 503 …
    # New attempts by cause; and what became of requests on a worker that leaves.
    continuations: Counter[str] = field(default_factory=_from_zero("lost_prefill", "lost_decode"))
    migrations: Counter[str] = field(default_factory=_from_zero("migrated", "recomputed"))
    stale_batons: Counter[str] = field(default_factory=Counter)  # by cause: stale, unreachable, lease_ended
    refusals: Counter[str] = field(default_factory=Counter)  # by reason
    dropped_messages: Counter[str] = field(default_factory=Counter)  # by cause: unknown, old_attempt, …
    transitions: Counter[str] = field(default_factory=Counter)  # by table row: "waiting Placed"
    workers_refused: Counter[str] = field(default_factory=Counter)  # by cause: protocol, role
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    fetched_bytes: int = 0
    observations: deque[tuple[str, float]] = field(default_factory=lambda: deque(maxlen=OBSERVATIONS_MAX))

    def observe(self, name: str, seconds: float) -> None:
        """Note one measurement."""
        self.observations.append((name, seconds))

"""Which child process to start when: backoff, and the difference between a crash and a child that cannot start.

Pure: it is told what happened and when, and says what to do. A child that leaves with an error before it was ever
ready will do so again (a wrong setting, a missing model), so the deployment ends. One that was ready, or that a signal
ended, is started again after a pause that doubles with each quick death.
"""

from __future__ import annotations

from dataclasses import dataclass

BACKOFF_SECONDS = 0.5
BACKOFF_SECONDS_MAX = 10.0
STABLE_SECONDS = 30.0  # who lived so long has earned a short pause again


@dataclass(slots=True)
class _ChildState:
    started_at: float = 0.0
    ready: bool = False
    ever_ready: bool = False
    quick_deaths: int = 0
    start_at: float | None = None


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Start the child once more, in so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """It cannot start: end the deployment."""


class RestartPolicy:
    """The state of every child by name; times are seconds of one monotonic clock."""

    def __init__(self, names: list[str]):
        self._children = {name: _ChildState(start_at=0.0) for name in names}

    def due(self, now: float) -> list[str]:
        """Children to start now, in their order."""
        return [
            name
            for name, child in self._children.items()
            if child.start_at is not None and child.start_at <= now
        ]

    def started(self, name: str, now: float) -> None:
        """The child runs."""
        child = self._children[name]
        child.started_at, child.start_at, child.ready = now, None, False

    def became_ready(self, name: str) -> None:
        """The child serves."""
        self._children[name].ready = self._children[name].ever_ready = True

    def is_ready(self, name: str) -> bool:
        """Whether the child runs and serves."""
        return self._children[name].ready

    def all_ready(self) -> bool:
        """Whether the full set serves."""
        return all(child.ready for child in self._children.values())

    def ended(self, name: str, status: int, now: float) -> StartAgain | GiveUp:
        """The child has ended; a negative status is the signal that ended it."""
        child = self._children[name]
        child.ready = False
        if status >= 0 and not child.ever_ready:
            return GiveUp()
        child.quick_deaths = 0 if now - child.started_at >= STABLE_SECONDS else child.quick_deaths + 1
        doublings = max(0, child.quick_deaths - 1)
        seconds = min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS * 2.0 ** min(doublings, 10))
        child.start_at = now + seconds
        return StartAgain(seconds)

"""Which child process to start, and when: it tells a crash from a child that cannot start.

Knows no processes, no threads and no clock: the caller reports what happened and when, and carries out the answer.

A child that exits before it was ever ready would do so again (a wrong setting, a missing model), so the deployment
ends. A child that was ready once, or that a signal ended, is started again. The pause before that doubles with each
quick end and is short again after a long life.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.primitives.backoff import backoff_seconds

BACKOFF_SECONDS = 0.5
BACKOFF_SECONDS_MAX = 10.0
STABLE_SECONDS = 30.0  # a child that ran this long is restarted after the short pause again


@dataclass(slots=True)
class _ChildState:
    started_at: float = 0.0
    ready: bool = False
    ever_ready: bool = False
    quick_ends: int = 0  # in a row
    start_at: float | None = None  # None: it runs


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the child again after this pause."""

    seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The child cannot start: end the deployment."""


class RestartPolicy:
    """The state of every child, by name. All times are seconds of one monotonic clock."""

    def __init__(self, names: list[str]):
        self._children = {name: _ChildState(start_at=0.0) for name in names}

    def due(self, now: float) -> list[str]:
        """The children to start now, in the order they were named."""
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
        """Whether every child serves."""
        return all(child.ready for child in self._children.values())

    def ended(self, name: str, status: int, now: float) -> Restart | GiveUp:
        """The child has ended. `status` is its exit status; a negative one is the signal that ended it."""
        child = self._children[name]
        child.ready = False
        if status >= 0 and not child.ever_ready:
            return GiveUp()
        child.quick_ends = 0 if now - child.started_at >= STABLE_SECONDS else child.quick_ends + 1
        seconds = backoff_seconds(child.quick_ends, BACKOFF_SECONDS, BACKOFF_SECONDS_MAX)
        child.start_at = now + seconds
        return Restart(seconds)

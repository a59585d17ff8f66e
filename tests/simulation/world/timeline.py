"""The virtual clock, and processes that can be frozen and killed.

Everything that happens in a simulated world is an action at a point in time; actions of the same time happen in
the order they were scheduled. No threads, no real time.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from functools import partial

Action = Callable[[], None]


class Timeline:
    """Virtual seconds since the world began, and what is still to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._scheduled = 0

    def at(self, seconds: float, action: Action) -> None:
        """Let `action` happen at `seconds`, or now if that has passed."""
        self._scheduled += 1
        heapq.heappush(self._heap, (self.now if seconds < self.now else seconds, self._scheduled, action))

    def after(self, seconds: float, action: Action) -> None:
        """Let `action` happen in `seconds` from now."""
        self.at(self.now + seconds, action)

    def advance(self) -> bool:
        """Let the next action happen; False if there is none."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        action()
        return True


class TimelineProcess:
    """An operating system process: frozen, its actions wait for the thaw; dead, they never happen."""

    def __init__(self, timeline: Timeline, name: str):
        self.timeline = timeline
        self.name = name
        self.alive = True
        self.frozen = False
        self._blocked_until = 0.0
        self._stalled: list[Action] = []

    @property
    def now(self) -> float:
        """Its clock; ahead of the timeline after a turn in which it blocked."""
        now, blocked_until = self.timeline.now, self._blocked_until
        return blocked_until if now < blocked_until else now

    @property
    def runs(self) -> bool:
        return self.alive and not self.frozen

    def at(self, seconds: float, action: Action) -> None:
        """Let this process do something at `seconds`, or as soon as it runs."""
        self.timeline.at(seconds, partial(self.do, action))

    def after(self, seconds: float, action: Action) -> None:
        """Let this process do something in `seconds` from now."""
        self.at(self.timeline.now + seconds, action)

    def do(self, action: Action) -> None:
        """Do something now, or as soon as the process runs."""
        if self.frozen:
            self._stalled.append(action)
        elif self.alive:
            action()

    def block(self, until_seconds: float) -> None:
        """The process waits within an action: its clock goes on, nothing else does."""
        self._blocked_until = max(self._blocked_until, until_seconds)

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        """Go on; what has waited happens in the order it was scheduled."""
        self.frozen = False
        stalled, self._stalled = self._stalled, []
        for action in stalled:
            self.timeline.at(self.timeline.now, partial(self.do, action))

    def kill(self) -> None:
        self.alive = False
        self.frozen = False
        self._stalled.clear()


class Journal:
    """What happened, line by line, as a digest: two runs of a seed must agree in it."""

    def __init__(self, timeline: Timeline, show: Callable[[str], None] | None = None):
        self._timeline = timeline
        self._show = show
        self._digest = hashlib.blake2b(digest_size=16)

    def note(self, who: str, what: object) -> None:
        """Add a line."""
        line = f"{self._timeline.now:10.6f} {who:12} {what}"
        self._digest.update(line.encode())
        if self._show:
            self._show(line)

    def digest(self) -> str:
        return self._digest.hexdigest()

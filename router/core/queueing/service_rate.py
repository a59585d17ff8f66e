"""How many requests a second are taken out of a queue while others in it find no room.

Only such time counts: a queue that is empty, or that no worker serves at all, does not show how fast it could be
served. The rate covers the last takes, however long they took, and at least the last seconds. After a long time without
a wait it is forgotten, because the fleet may be another one. It has no clock: `now`, in seconds, never decreases.
"""

from __future__ import annotations

from collections import deque

TAKES_MIN = 16  # fewer show no rate
WINDOW_TAKES = 64
WINDOW_SECONDS = 5.0  # of waiting
MARK_SECONDS = 0.1  # of waiting, and a take, between two marks: so there are about a hundred
FORGOTTEN_SECONDS = 60.0  # without a wait


class ServiceRate:
    """The rate of one queue; `passed` follows each placement pass."""

    def __init__(self) -> None:
        self.blocked = False  # since the last pass some request has found no room
        self._at = 0.0  # the time of that pass
        self._waited = 0.0  # seconds in which requests found no room
        self._taken = 0  # requests taken meanwhile
        self._marks: deque[tuple[float, int]] = deque([(0.0, 0)])  # waited and taken, the oldest first

    def passed(self, taken: int, blocked: bool, now: float) -> None:
        """A pass placed `taken` requests; `blocked`: others found no room."""
        if self.blocked:
            self._waited += now - self._at
            self._taken += taken
            self._mark()
        elif blocked and now - self._at > FORGOTTEN_SECONDS:
            self._marks = deque([(self._waited, self._taken)])
        if self.blocked or blocked:
            self._at = now
        self.blocked = blocked

    def give_back(self) -> None:
        """A request that was taken comes back, because the worker had no room after all."""
        if self.blocked:
            self._taken -= 1

    def per_second(self, now: float, patience: float) -> float | None:
        """Requests taken a second; None: not known, for less than `patience` seconds of waiting and few takes."""
        first_waited, first_taken = self._marks[0]
        waited = self._waited - first_waited + (now - self._at if self.blocked else 0.0)
        taken = max(0, self._taken - first_taken)
        if not waited or (taken < TAKES_MIN and waited < patience):
            return None
        return taken / waited

    def _mark(self) -> None:
        waited, taken = self._marks[-1]
        if self._waited - waited < MARK_SECONDS or self._taken <= taken:
            return
        self._marks.append((self._waited, self._taken))
        while len(self._marks) > 2 and self._covers(*self._marks[1]):
            self._marks.popleft()

    def _covers(self, waited: float, taken: int) -> bool:
        """Whether what came after this mark is enough to go by."""
        return self._waited - waited >= WINDOW_SECONDS and self._taken - taken >= WINDOW_TAKES

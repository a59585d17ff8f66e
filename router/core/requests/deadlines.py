"""Named points in time, the earliest first.

A deadline has a name, so that it can be set again or cleared without a handle. It knows neither clocks nor
what the names mean.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

Name = TypeVar("Name")


class Deadlines(Generic[Name]):
    """A heap with lazy removal: an entry counts only while `_at` agrees with it."""

    def __init__(self) -> None:
        self._at: dict[Name, float] = {}
        self._heap: list[tuple[float, int, Name]] = []  # (seconds, number of the setting, name)
        self._settings = 0

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, name: Name) -> bool:
        return name in self._at

    def set(self, name: Name, seconds: float) -> None:
        """Let `name` fall due at `seconds`, and at no other time."""
        self._at[name] = seconds
        self._settings += 1
        heapq.heappush(self._heap, (seconds, self._settings, name))
        if len(self._heap) > 2 * len(self._at) + 64:
            self._compact()

    def clear(self, name: Name) -> None:
        """Forget `name`, if it is set."""
        self._at.pop(name, None)

    def next(self) -> float | None:
        """The earliest point in time, or None."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Iterator[Name]:
        """Take out what is due, one by one: a name cleared meanwhile does not come."""
        while (seconds := self.next()) is not None and seconds <= now:
            name = heapq.heappop(self._heap)[2]
            del self._at[name]
            yield name

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
        heapq.heapify(self._heap)

"""Which workers can take something now, drawn at random where there are many."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)


class OpenWorkers(Generic[W]):
    """The workers of a role that can take something: adding, removing and drawing one cost O(1).

    A worker here may still refuse a particular request; one that is not here takes none (`Worker.is_open`). The list
    has no gaps, and its order follows what happened, not who is best.
    """

    def __init__(self) -> None:
        self._workers: list[W] = []
        self._places: dict[W, int] = {}

    @property
    def all(self) -> Sequence[W]:
        """Not a copy."""
        return self._workers

    def put(self, worker: W, *, is_open: bool) -> None:
        """Take a worker in or out; a no-op where it is so already."""
        place = self._places.get(worker)
        if is_open and place is None:
            self._places[worker] = len(self._workers)
            self._workers.append(worker)
        elif not is_open and place is not None:
            last = self._workers.pop()
            del self._places[worker]
            if last is not worker:
                self._workers[place] = last
                self._places[last] = place

    def draw(self, count: int, seed: int) -> list[W]:
        """Up to `count` of them; the same for the same seed and history."""
        size = len(self._workers)
        if size <= count:
            return list(self._workers)
        drawn: dict[W, None] = {}
        for _ in range(count):
            seed = (seed * 1664525 + 1013904223) & 0xFFFFFFFF  # a generator by Knuth and Lewis
            drawn[self._workers[(seed >> 8) % size]] = None
        return list(drawn)

"""Guards host memory that a plan fills and a stream copies later.

A plan for step N + 1 that is made while the copy for step N still waits in its stream would change what step N reads.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.engine.streams import Mark


class PlanGuard:
    """`with guard:` around each plan: waits until the stream has copied the plan before. Mostly it long has."""

    def __init__(self, record: Callable[[], Mark]) -> None:
        self._record = record
        self._copied: Mark | None = None

    def __enter__(self) -> None:
        if self._copied is not None:
            self._copied.wait()

    def __exit__(self, *_: object) -> None:
        self._copied = self._record()

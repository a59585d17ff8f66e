"""Waiting in tests for another thread or process: for a condition, and bounded; never for a time and a hope."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 0.02  # between two looks


def comes_true(condition: Callable[[], object], seconds_max: float = 5.0) -> bool:
    """Whether the condition holds within so many seconds."""
    deadline = time.monotonic() + seconds_max
    pause = threading.Event()
    while not condition():
        if time.monotonic() >= deadline:
            return False
        pause.wait(LOOK_SECONDS)
    return True


def until(condition: Callable[[], object], seconds_max: float, what: str) -> None:
    """Wait for the condition; fails when it does not come in time."""
    assert comes_true(condition, seconds_max), f"{what} did not happen within {seconds_max} s"

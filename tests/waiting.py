"""Waiting in tests for another thread or process: for a condition, and bounded; never for a fixed time.

Two kinds of bound exist. One ends a test that hangs: it is large, and stays as it is. The other judges a promise ("gone
within a second"): it is small, and a slow or busy machine would break it without any fault in the program. Such a bound
is written as `soon(1)`. The product's own settings are never scaled.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 0.02  # between two looks, at first
LOOK_SECONDS_MAX = 0.1  # later, by default: a look at the metrics of five processes takes 30 ms of CPU time
WORK_TURNS = 2_000_000
WORK_SECONDS = 0.07  # of the reference machine for these turns: an AMD EPYC, idle, with Python 3.11
SLOWNESS_MAX = 6.0  # a machine that is slower than this is too slow to judge anything


def comes_true(
    condition: Callable[[], object], seconds_max: float = 5.0, look_seconds_max: float = LOOK_SECONDS_MAX
) -> bool:
    """Whether the condition holds within this time."""
    began_at = time.monotonic()
    pause = threading.Event()
    while not condition():
        waited = time.monotonic() - began_at
        if waited >= seconds_max:
            return False
        look = min(max(LOOK_SECONDS, waited / 20), look_seconds_max)
        pause.wait(min(look, seconds_max - waited))
    return True


def until(
    condition: Callable[[], object],
    seconds_max: float,
    what: str,
    look_seconds_max: float = LOOK_SECONDS_MAX,
) -> None:
    """Wait for the condition; fails when it does not come in time."""
    assert comes_true(condition, seconds_max, look_seconds_max), (
        f"{what} did not happen within {seconds_max} s"
    )


def soon(seconds: float) -> float:
    """This many seconds of the reference machine, in seconds of this one: the same or more, at most six times."""
    return seconds * slowness()


@functools.cache
def slowness() -> float:
    """How many times slower than the reference this machine is, from 1 to `SLOWNESS_MAX`.

    Measured once per test process, by a fixed amount of work in the interpreter. It takes wall time, so that other
    work on the machine counts too.
    """
    began_at = time.perf_counter()
    value = 0
    for turn in range(WORK_TURNS):
        value = (value * 31 + turn) & 0xFFFF
    return min(max(1.0, (time.perf_counter() - began_at) / WORK_SECONDS), SLOWNESS_MAX)

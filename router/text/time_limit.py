"""A time limit for work in a thread: a chat template may loop without end, and its thread would be lost.

Work that is late is ended by an exception that is raised in its thread (`PyThreadState_SetAsyncExc`), between two
instructions of Python, so it ends loops of a template, but not one long call into C. Who raises it is a watching
thread, which lives while something runs.

    run(work) ── enter ──────── work() ──────── leave ──
                   └ the exception comes only between these two, because both and the watcher take one lock

This file knows neither templates nor requests.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

CHECKS = 4  # within the limit, so work ends at most a quarter late


class TimeLimitError(Exception):
    """The work took longer than its limit."""


class _TimeUp(BaseException):
    """Raised in the thread of the work; no `except Exception` on the way stops it."""


class _Work:
    """One call that is running."""

    def __init__(self, deadline: float):
        self.thread_id = threading.get_ident()
        self.deadline = deadline
        self.late = False


class TimeLimit:
    """Runs calls, in any thread, for at most `seconds` each."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._lock = threading.Lock()
        self._running: dict[int, _Work] = {}  # by thread
        self._watched = False

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns; raises `TimeLimitError` if it takes too long."""
        own = _Work(time.monotonic() + self._seconds)
        try:
            self._enter(own)
            try:
                result = work()
            except _TimeUp:
                raise
            except BaseException:
                self._leave(own)
                raise
            self._leave(own)
            return result
        except _TimeUp:  # raised once; the watcher has taken the work out already
            raise TimeLimitError(f"not done within {self._seconds:g} seconds") from None

    def _enter(self, own: _Work) -> None:
        with self._lock:
            self._running[own.thread_id] = own
            if self._watched:
                return
            self._watched = True
        threading.Thread(target=self._watch, name="time-limit", daemon=True).start()

    def _leave(self, own: _Work) -> None:
        with self._lock:
            self._running.pop(own.thread_id, None)
        while own.late:  # the exception is on its way: let it come here, not later
            pass

    def _watch(self) -> None:
        idle = threading.Event()  # never set: a sleep
        while not idle.wait(self._seconds / CHECKS):
            with self._lock:
                if not self._running:
                    self._watched = False
                    return
                self._end_late_work()

    def _end_late_work(self) -> None:
        now = time.monotonic()
        for own in [work for work in self._running.values() if now >= work.deadline]:
            del self._running[own.thread_id]
            own.late = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(own.thread_id), ctypes.py_object(_TimeUp)
            )

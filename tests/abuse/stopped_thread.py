"""Stops one thread of a process, and nothing else of it: a computing thread that hangs while its links live.

A signal would stop all threads. A tracer (`ptrace`) can stop one, and needs no help of the process: it is what
debuggers do. Only the thread that began to trace may end it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.abuse.procfs import cpu_seconds, threads
from tests.waiting import comes_true

SEIZE, INTERRUPT, DETACH = 0x4206, 0x4207, 17
WAIT_ALL = 0x40000000  # __WALL: threads, too
BUSY_SECONDS = 0.1  # of CPU, that make a thread the computing one

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


@contextmanager
def stopped_thread(pid: int, thread: int) -> Iterator[None]:
    """The thread stands still; it may be killed with its process meanwhile."""
    _trace(SEIZE, thread)
    try:
        _trace(INTERRUPT, thread)
        os.waitpid(thread, WAIT_ALL)
        yield
    finally:
        if _libc.ptrace(DETACH, thread, None, None):  # it has ended: let the kernel forget it
            try:
                os.waitpid(thread, WAIT_ALL)
            except ChildProcessError:
                assert not os.path.exists(f"/proc/{pid}/task/{thread}"), "the thread is still traced"


def computing_thread(pid: int) -> int:
    """The thread that takes the most CPU time from now on."""
    before = {thread: cpu_seconds(pid, thread) for thread in threads(pid)}
    spent: dict[int, float] = {}

    def busy() -> bool:
        spent.update({thread: cpu_seconds(pid, thread) - used for thread, used in before.items()})
        return max(spent.values()) >= BUSY_SECONDS

    assert comes_true(busy, 20), "no thread computes"
    return max(spent, key=lambda thread: spent[thread])


def _trace(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None):
        raise OSError(ctypes.get_errno(), f"cannot trace thread {thread}: {os.strerror(ctypes.get_errno())}")

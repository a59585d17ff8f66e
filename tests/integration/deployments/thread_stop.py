"""Stops one thread of another process, as a hang in a kernel or in a driver would, or all of it, and lets it go on.

One thread is stopped by ptrace, and the process's other threads run. Only the thread that stopped it may let it go on,
and Linux lets a process do this to its descendants alone, or as root. A whole process is stopped by signals.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.integration.deployments.deployment import LocalDeployment, RunningProcess
from tests.waiting import until

SEIZE, INTERRUPT, DETACH = 0x4206, 0x4207, 17  # requests of ptrace(2)
LINK_STOPPED_SECONDS = 1.5  # of the thread that reads pages: a prompt takes a part of it
ALL_KINDS_OF_CHILDREN = 0x40000000  # __WALL of waitpid(2): threads, too

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


@contextmanager
def stopped(thread: int) -> Iterator[None]:
    """The thread of this number does nothing within. Raises OSError where the system does not allow it."""
    _ptrace(SEIZE, thread)
    try:
        _ptrace(INTERRUPT, thread)
        os.waitpid(thread, ALL_KINDS_OF_CHILDREN)
        yield
    finally:
        _ptrace(DETACH, thread)


@contextmanager
def process_stopped(pid: int) -> Iterator[None]:
    """The process does nothing within."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def by_turns(
    stop: Callable[[], AbstractContextManager[None]], stopped_seconds: float, running_seconds: float = 0.02
) -> Iterator[None]:
    """What `stop` stops stands still for most of the time, and goes on for a moment again and again."""
    ending = threading.Event()

    def turn() -> None:
        while not ending.is_set():
            with stop():
                ending.wait(stopped_seconds)
            ending.wait(running_seconds)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def busiest_thread(pid: int) -> int:
    """The thread that has used the CPU most."""
    threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    return max(threads, key=lambda thread: _cpu_ticks(pid, thread))


def reader_of_pages(running: LocalDeployment, decode: RunningProcess) -> int:
    """The thread that reads pages over TLS: the first read starts it. Skips where no test may stop a thread."""
    before = _threads(decode.pid)
    running.client.completions.create(model="smollm2", prompt="Once upon a time " * 20, max_tokens=3)
    (reader,) = _threads(decode.pid) - before
    try:
        with stopped(reader):
            return reader
    except PermissionError:
        pytest.skip("this system does not let a test stop a thread")


def _threads(pid: int) -> set[int]:
    return {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()}


def _ptrace(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _cpu_ticks(pid: int, thread: int) -> int:
    fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def stop_computing(worker: RunningProcess, hang: ExitStack) -> None:
    """Stop its computing thread; not where that holds the interpreter's lock, for then nothing in it would live on."""

    def stop() -> bool:
        with ExitStack() as attempt:
            attempt.enter_context(stopped(busiest_thread(worker.pid)))
            if lives(worker):
                hang.push(attempt.pop_all())
                return True
        return False

    try:
        until(stop, 20, "a stop of the computing thread alone")
    except PermissionError:
        pytest.skip("this system does not let a test stop a thread")


def lives(worker: RunningProcess) -> bool:
    """Whether its other threads run."""
    try:
        return httpx2.get(f"http://127.0.0.1:{worker.admin_port}/livez", timeout=0.5).is_success
    except httpx2.TransportError:
        return False

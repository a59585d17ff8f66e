"""SIGTERM and SIGINT of a worker, heard by a thread: its main thread may stand in a call that does not come back.

    kernel ──number──► pipe ──► thread ──► WorkerDrain ◄── the loop asks before each turn
                                   └── asked to exit at once, and the loop did not: ends the process

Python calls handlers between two steps of the main thread: not while a call waits for a GPU that hangs. Where the main
thread waits for a rank that is frozen, they are called, but the loop does not turn. The kernel closes the links then,
so routers send what runs here elsewhere.
"""

from __future__ import annotations

import os
import signal
import threading
from time import monotonic, sleep

import structlog

from shared.process.role_main import exit_now
from shared.scheduling.drain import WorkerDrain

# For the step under way and what is closed behind the loop: two seconds where reads are cut, five for a rank that is
# frozen between two steps.
END_SECONDS = 8.0

log = structlog.get_logger(__name__)


def listen(drain: WorkerDrain, end_seconds: float = END_SECONDS) -> None:
    """From now on SIGTERM drains the process. Before, it just ends it, because the worker holds nothing yet."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # without a handler its number would not be written
    threading.Thread(target=_hear, args=(reading, drain, end_seconds), name="signals", daemon=True).start()


def _hear(reading: int, drain: WorkerDrain, end_seconds: float) -> None:
    while not drain.ends_at_once:
        for number in os.read(reading, 64):
            if number == signal.SIGINT:
                drain.sigint()
            else:
                drain.sigterm(monotonic())
    sleep(end_seconds)
    try:
        log.critical("worker.ended_in_step", seconds=end_seconds)
    finally:
        exit_now(status=1)

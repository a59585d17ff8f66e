"""SIGTERM and SIGINT of a process that does not serve yet: they end it.

Process 1 of a container has no default action for a signal: the kernel drops one that has no handler, and Kubernetes
sends one SIGTERM, then waits for the whole grace of the pod. So `__main__` of each role calls this before it imports
anything but the standard library. What is left is the start of Python itself.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def end_on_signals() -> None:
    """From now on SIGTERM and SIGINT end this process, until others handle them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end if os.getpid() == 1 else signal.SIG_DFL)


def _end(number: int, _: object) -> NoReturn:
    """Exit. Python calls it between two of its own steps only, so a long call into a library delays it."""
    os._exit(128 + number)

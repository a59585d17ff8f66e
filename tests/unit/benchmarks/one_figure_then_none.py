"""A part of `tests.gpu` that prints a figure and hangs."""

from __future__ import annotations

import sys
import threading

if __name__ == "__main__":
    sys.stdout.write("a step: 1.0 ms\n")
    threading.Event().wait()

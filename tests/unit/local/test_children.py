"""The parent of a deployment's processes, and signals that come at any moment of its loop."""

from __future__ import annotations

import subprocess
import sys

ENDED_TIMES = 30
PARENT = f"""
import os, signal, subprocess, threading
from shared.local import children
from shared.local.console import StartupConsole
from tests.integration.deployments.small_deployment import NOWHERE
from tests.waiting import until

children.POLL_SECONDS = 0.0  # so that a signal comes between two instructions of the loop, not in a wait

def end():  # by another process: a thread of this one would only send it where this thread lets it run
    until(lambda: signal.getsignal(signal.SIGINT) is not signal.default_int_handler, 10, "the loop's handler")
    subprocess.run(["kill", "-INT", str(os.getpid())], check=True)

for _ in range({ENDED_TIMES}):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=end, daemon=True).start()
    children.ChildProcesses([], StartupConsole(), NOWHERE).run()
"""


def test_a_signal_at_any_moment_ends_the_loop() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert ended.stdout.count("ending") == ENDED_TIMES

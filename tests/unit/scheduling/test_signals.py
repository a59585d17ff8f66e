"""How SIGTERM and SIGINT reach a worker whose main thread does not come back from a call."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

# A lock of C is not given up for a signal, so Python calls no handler: so it is where a GPU hangs.
STUCK = """
import ctypes
from shared.process.logs import configure
from shared.scheduling.drain import WorkerDrain
from shared.worker import signals

class ToldDrain(WorkerDrain):
    def sigterm(self, now):
        super().sigterm(now)
        print("SIGTERM", flush=True)

configure("info", "json", role="decode", uid="a")
signals.listen(ToldDrain(3600.0), 0.2)
print("listening", flush=True)
lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
libc.pthread_mutex_lock(lock)
libc.pthread_mutex_lock(lock)
"""


@pytest.mark.parametrize("at_once", [signal.SIGTERM, signal.SIGINT], ids=["a second SIGTERM", "SIGINT"])
def test_a_worker_whose_loop_stands_still_ends_when_it_is_to_end_at_once(at_once: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "listening\n"
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "SIGTERM\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)  # it may go on for its drain
            process.send_signal(at_once)
            assert process.wait(60) == 1
            said = json.loads(process.stderr.read())
        finally:
            process.kill()
    assert (said["event"], said["level"]) == ("worker.ended_in_step", "critical")

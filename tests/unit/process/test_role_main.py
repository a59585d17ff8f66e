"""How a role's process begins and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def test_a_role_may_open_as_many_descriptors_as_the_system_allows_and_leaves_no_core() -> None:
    program = """
import resource, sys
from shared.process.process_config import ProcessConfig
from shared.process.role_main import run_role
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))

def serve(config):
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    assert resource.getrlimit(resource.RLIMIT_CORE)[0] <= 1

sys.argv = ["prefill"]
run_role("prefill", ProcessConfig, serve)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0, ended.stderr


def test_a_router_says_that_it_may_open_few_descriptors() -> None:
    program = """
import resource, sys
from shared.process.process_config import ProcessConfig
from shared.process.role_main import run_role
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))
sys.argv = ["router"]
run_role("router", ProcessConfig, lambda config: None)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    (line,) = ended.stderr.splitlines()
    said = json.loads(line)
    assert (said["event"], said["level"]) == ("process.few_descriptors", "warning")
    assert (said["limit"], said["before"]) == (1024, 512)


def test_heartbeats_that_come_after_the_silence_that_counts_as_a_loss_are_refused() -> None:
    program = """
import sys
from shared.process.process_config import ProcessConfig
from shared.process.role_main import run_role
run_role("prefill", ProcessConfig, lambda config: None)
"""
    for heartbeat, status in ("1.9", 0), ("2", 1):
        ended = subprocess.run(
            [sys.executable, "-c", program, "--heartbeat-seconds", heartbeat, "--silence-seconds", "2"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert ended.returncode == status, ended.stderr
    assert (
        "prefill: heartbeat_seconds is 2 and silence_seconds 2, so each peer would count as lost"
        in ended.stderr
    )


def test_an_unexpected_error_ends_the_process_with_one_line_whatever_threads_still_run() -> None:
    program = """
import sys, threading
from shared.process.process_config import ProcessConfig
from shared.process.role_main import run_role

def serve(config):
    threading.Thread(target=threading.Event().wait).start()
    raise KeyError("what a client wrote")

sys.argv = ["prefill"]
run_role("prefill", ProcessConfig, serve)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    failed = json.loads(line)
    assert (failed["event"], failed["level"], failed["error"]) == ("process.failed", "critical", "KeyError")
    assert "serve" in failed["at"][-1]
    assert "what a client wrote" not in line


def test_a_crash_leaves_no_image_of_keys_and_prompts(tmp_path: Path) -> None:
    """The limit is 1 byte: the kernel hands an image to a program of `core_pattern` unless it is exactly that."""
    program = """
import os, resource
from shared.process.role_main import forbid_core_dumps
forbid_core_dumps()
assert resource.getrlimit(resource.RLIMIT_CORE)[0] <= 1
os.abort()
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, check=False)
    assert ended.returncode == -6, ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_sentence_of_a_process_that_could_not_start_is_its_last_line() -> None:
    program = """
import structlog
from shared.process import logs, role_main
logs.configure("info", "json", role="router", uid="r")
structlog.get_logger().warning("settings.unknown_variable")
role_main.exit_with_error("router: no such folder")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    first, last = ended.stderr.splitlines()
    assert "settings.unknown_variable" in first
    assert last == "segue router: no such folder"


def test_what_is_loaded_is_set_aside_for_the_collector_and_later_cycles_are_found() -> None:
    program = """
import gc, weakref
from shared.process.role_main import YOUNG_OBJECTS_OF_WORKER, spare_what_is_loaded

class Ring:
    def __init__(self):
        self.itself = self

loaded = [[] for _ in range(1000)]
garbage = weakref.ref(Ring())
spare_what_is_loaded(YOUNG_OBJECTS_OF_WORKER)
assert garbage() is None, "garbage was set aside"
assert gc.get_freeze_count() > 1000
assert not any(each is loaded for each in gc.get_objects()), "a collection looks at what was loaded"
later = weakref.ref(Ring())
kept = [[] for _ in range(YOUNG_OBJECTS_OF_WORKER + 1)]
assert later() is None, "a cycle is never found"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_sigterm_ends_process_1_while_it_still_imports(role: str, tmp_path: Path) -> None:
    """A pod gets one SIGTERM: where it is lost, the pod lives out its grace."""
    isolated = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace for processes can be made here")
    first = "import os, signal\nassert os.getpid() == 1\nos.kill(1, signal.SIGTERM)\nprint('the signal was lost')\n"
    for imported in ("msgspec", "structlog"):  # what comes first from other packages
        (tmp_path / f"{imported}.py").write_text(first, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    ended = subprocess.run(
        [*isolated, sys.executable, "-m", role],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, ""), ended.stderr

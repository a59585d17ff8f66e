"""The processes of a deployment: started again when they die, and gone when the parent is gone, however it went."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.deployments.running import Running, ended_within
from tests.waiting import soon, until

Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts small deployments, and ends what a test left running."""
    running: list[Running] = []

    def start(*kinds: str) -> Running:
        running.append(Running("-m", "tests.integration.deployments.small_deployment", *kinds))
        return running[-1]

    yield start
    for deployment in running:
        deployment.close()


def await_ready(deployment: Running) -> list[int]:
    deployment.line(lambda line: line.startswith("ready in "), 30)
    return list(deployment.children())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_alone_ends_all_within_five_seconds(
    start: Start, number: signal.Signals
) -> None:
    deployment = start("steady", "steady", "stubborn")
    pids = await_ready(deployment)
    assert len(pids) == 3
    deployment.process.send_signal(number)
    assert ended_within([deployment.process.pid, *pids], soon(5))
    assert deployment.process.wait() == 0
    deployment.close()
    assert [line for line in deployment.lines if "killed" in line] == [
        "stubborn-2 did not end within 3 s: killed"
    ]


def test_children_that_are_too_busy_to_answer_end_at_once(start: Start) -> None:
    deployment = start("busy", "busy", "busy", "--grace-seconds", "60")
    for _ in range(3):
        deployment.line(lambda line: line.endswith("| listening"), 30)
    pids = [deployment.process.pid, *deployment.children()]
    deployment.process.send_signal(signal.SIGINT)
    assert ended_within(pids, soon(1))
    deployment.close()
    assert not [line for line in deployment.lines if "killed" in line]


def test_children_end_when_the_parent_is_killed(start: Start) -> None:
    deployment = start("steady", "stubborn")
    pids = await_ready(deployment)
    deployment.process.kill()
    assert ended_within(pids, soon(5))


def test_a_killed_child_is_started_again_on_its_port(start: Start) -> None:
    deployment = start("steady", "steady")
    before = await_ready(deployment)
    os.kill(before[1], signal.SIGKILL)
    ended = deployment.line(lambda line: "killed by signal 9" in line, 10)
    name = ended.split()[0]
    again = deployment.line(lambda line: line.startswith(f"{name}: ready"), 15)
    after = list(deployment.children())
    assert before[0] in after
    assert before[1] not in after
    assert f"pid {(set(after) - set(before)).pop()}" in again


def test_a_child_whose_loop_hangs_is_killed_and_started_again(start: Start) -> None:
    deployment = start("steady", "hanging")
    before = await_ready(deployment)
    deployment.line(lambda line: line == "hanging-1 hangs: its /livez fails; killing it", 30)
    deployment.line(lambda line: line.startswith("hanging-1 ended (killed by signal 9)"), 10)
    again = deployment.line(lambda line: line.startswith("hanging-1: ready"), 30)
    after = list(deployment.children())
    assert before[0] in after, "the other one is left alone"
    assert f"pid {(set(after) - set(before)).pop()}" in again


def test_a_child_whose_words_nobody_reads_does_not_wait_for_a_reader(tmp_path: Path) -> None:
    """As where the terminal has gone, or `2> >(head)` has ended."""
    reading, writing = os.pipe()
    os.close(reading)
    said = tmp_path / "said"
    words = [sys.executable, "-m", "tests.integration.deployments.small_deployment", "wordy"]
    with said.open("w") as out:
        deployment = subprocess.Popen(words, stdout=out, stderr=writing)
    os.close(writing)
    try:
        until(lambda: "wordy-0: ready" in said.read_text(), 60, "the child becomes ready")
    finally:
        deployment.kill()
        deployment.wait()


def test_a_child_that_cannot_start_ends_the_deployment_with_its_sentence(start: Start) -> None:
    deployment = start("steady", "broken")
    assert deployment.process.wait(15) == 1
    deployment.close()
    assert deployment.lines[-1] == "segue up: broken-1 could not start: the flux capacitor is missing"
    assert sum("flux" in line for line in deployment.lines) == 1
    assert not [line for line in deployment.lines if "Traceback" in line]

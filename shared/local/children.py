"""The child processes of a deployment on this machine: starting, watching, starting again, ending.

Children hold the reading end of a pipe whose writing end only this process has: however this process ends, they end.
What to start again and when is decided by `supervision`; how a child answers probes, by the child. This file knows
neither models nor settings: a child is a role, arguments and a port.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from shared.errors import StartError
from shared.local.console import StartupConsole
from shared.local.supervision import GiveUp, RestartPolicy

HOST = "127.0.0.1"
POLL_SECONDS = 0.1
PROBE_SECONDS_MAX = 1.0
GRACE_SECONDS = 3.0  # from the signal to SIGKILL; all ends within 5


@dataclass(slots=True)
class Child:
    """One process of the deployment; `process` is the present incarnation."""

    name: str
    role: str  # the package that `python -m` runs
    http_port: int
    arguments: list[str]
    process: subprocess.Popen[str] | None = None
    answers: bool = False  # its probes, and so it listens to signals
    last_words: str = ""  # the last line on stderr: why it could not start
    reader: threading.Thread | None = field(default=None, repr=False)


class ChildProcesses:
    """The running children. Everything happens on the main thread but the reading of their stderr."""

    def __init__(
        self,
        children: list[Child],
        environment: dict[str, str],
        narration: StartupConsole,
        inherited: Sequence[int] = (),  # descriptors that the children's arguments name
    ):
        self._children = children
        self._environment = environment
        self._inherited = inherited
        self._narration = narration
        self._workers = sum(child.role != "router" for child in children)
        self._supervision = RestartPolicy([child.name for child in children])
        self._stop = threading.Event()
        self._began_at = time.monotonic()
        self._announced = False
        self._lifeline, self._held_end = os.pipe()  # the held end is closed by our death at the latest

    def run(self, model: str) -> None:
        """Start, watch, start again; returns when asked to stop. Raises StartError when a child cannot start."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._stop.set())
        try:
            while not self._stop.wait(POLL_SECONDS):
                self._start_those_due()
                self._notice_the_ended()
                self._ask_the_unready()
                if not self._announced and self._supervision.all_ready():
                    self._announced = True
                    address = f"{HOST}:{self._children[0].http_port}"
                    self._narration.ready(address, model, time.monotonic() - self._began_at)
            self._narration.quiet()
            self._narration.say("ending")
        finally:
            self._narration.quiet()
            self._end_all()

    def _start_those_due(self) -> None:
        for name in self._supervision.due(time.monotonic()):
            child = next(child for child in self._children if child.name == name)
            child.process = subprocess.Popen(
                [sys.executable, "-m", child.role, *child.arguments, "--lifeline-fd", str(self._lifeline)],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=self._environment,
                pass_fds=[self._lifeline, *self._inherited],
                process_group=0,  # Ctrl-C is for us; the children are told in order
            )
            child.reader = threading.Thread(target=self._relay, args=(child, child.process), daemon=True)
            child.reader.start()
            self._supervision.started(name, time.monotonic())
            self._narration.doing(name, "starting")

    def _relay(self, child: Child, process: subprocess.Popen[str]) -> None:
        """Pass on what the child writes to stderr, but its last words: those become our sentence."""
        assert process.stderr is not None
        own = f"segue {child.role}: "
        for line in process.stderr:
            child.last_words = line.strip().removeprefix(own) or child.last_words
            if not line.startswith(own):
                sys.stderr.write(f"{child.name} | {line}")
                sys.stderr.flush()

    def _notice_the_ended(self) -> None:
        for child in self._children:
            if child.process is None or (status := child.process.poll()) is None:
                continue
            if child.reader is not None:
                child.reader.join(PROBE_SECONDS_MAX)
            child.process, child.answers = None, False
            verdict = self._supervision.ended(child.name, status, time.monotonic())
            how = f"killed by signal {-status}" if status < 0 else f"status {status}"
            if isinstance(verdict, GiveUp):
                raise StartError(f"{child.name} could not start: {child.last_words or how}")
            self._narration.say(f"{child.name} ended ({how}); starting it again in {verdict.seconds:g} s")

    def _ask_the_unready(self) -> None:
        for child in self._children:
            if child.process is None or self._supervision.is_ready(child.name):
                continue
            report = _ask(child.http_port)
            if report is None:
                continue
            child.answers = True
            if report.ready and report.facts.get("workers_up", self._workers) == self._workers:
                self._supervision.became_ready(child.name)
                self._narration.chosen(child.name, report.facts)
            else:
                self._narration.doing(child.name, "waiting for workers" if report.ready else report.doing)

    def _end_all(self) -> None:
        """SIGINT ends a process at once; SIGTERM only while it starts: later it would let the process drain."""
        running = []
        for child in self._children:
            if child.process is not None:
                child.process.send_signal(signal.SIGINT if child.answers else signal.SIGTERM)
                running.append((child.name, child.process))
        deadline = time.monotonic() + GRACE_SECONDS
        for name, process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._narration.say(f"{name} did not end within {GRACE_SECONDS:g} s: killed")
                process.kill()
                process.wait()
        os.close(self._lifeline)
        os.close(self._held_end)


class _Report(msgspec.Struct):
    """What `/readyz` says; the router may say less."""

    ready: bool = False
    doing: str = "starting"
    facts: dict[str, str | int] = {}


def _ask(port: int) -> _Report | None:
    """What the process on `port` says of its readiness; None while it says nothing."""
    connection = http.client.HTTPConnection(HOST, port, timeout=PROBE_SECONDS_MAX)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    try:
        report = msgspec.json.decode(body, type=_Report)
    except msgspec.DecodeError:
        report = _Report()
    return msgspec.structs.replace(report, ready=answer.status == http.HTTPStatus.OK)

"""One child process of a deployment on this machine: its command, its stderr, its readiness, its end.

Two threads serve each process: one passes on its stderr, one asks its `/readyz` until it is ready. Neither can make
the main thread wait: a child that loads may take seconds to answer, and a signal must end the deployment at once.
Knows neither models nor settings, and does not decide what is started when.
"""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

HOST = "127.0.0.1"
PROBE_SECONDS = 0.1  # between two questions
PROBE_SECONDS_MAX = 1.0  # for an answer
LAST_LINES_SECONDS_MAX = 1.0  # to read what an ended process wrote


@dataclass(slots=True)
class Child:
    """What to run: `python -m ROLE ARGUMENTS`, which answers probes on its HTTP port."""

    name: str
    role: str
    http_port: int
    arguments: list[str]
    inherited: tuple[int, ...] = ()  # descriptors that the arguments name


class ReadinessReport(msgspec.Struct, frozen=True):
    """What a child answers at `/readyz`. The router's answer may have less."""

    ready: bool = False
    doing: str = "starting"
    facts: dict[str, str | int] = {}


class ChildProcess:
    """One process of a child, from its start to its end. A restarted child is a new one."""

    def __init__(self, child: Child, lifeline: int, environment: Mapping[str, str]):
        self.report: ReadinessReport | None = None  # the latest; None: it has not answered yet
        self.last_line = ""  # on stderr: why the process could not start
        self._child = child
        self._asked_enough = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", child.role, *child.arguments, "--lifeline-fd", str(lifeline)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            pass_fds=[lifeline, *child.inherited],
            process_group=0,  # Ctrl-C reaches only the parent, which then ends its children in order
        )
        self._relay = threading.Thread(target=self._relay_stderr, daemon=True)
        self._relay.start()
        threading.Thread(target=self._ask_until_enough, daemon=True).start()

    def status(self) -> int | None:
        """The exit status, or the negative number of the signal that ended the process; None while it runs."""
        status = self._process.poll()
        if status is not None:
            self.stop_asking()
            self._relay.join(LAST_LINES_SECONDS_MAX)
        return status

    def stop_asking(self) -> None:
        """The report is not needed any more."""
        self._asked_enough.set()

    def interrupt(self) -> None:
        """Make the process end at once, without draining.

        SIGINT does that, but a Python that is still starting would answer it with a traceback. Such a process ends
        by SIGTERM, before SIGINT can reach it.
        """
        self.stop_asking()
        if self.report is None:
            self._process.send_signal(signal.SIGTERM)
        self._process.send_signal(signal.SIGINT)

    def ended_within(self, seconds: float) -> bool:
        """Whether the process ends within this time; it is killed if not."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    def _relay_stderr(self) -> None:
        """Pass on what the child writes, except the sentence it ends with: the parent says that one."""
        assert self._process.stderr is not None
        own = f"segue {self._child.role}: "
        for line in self._process.stderr:
            self.last_line = line.strip().removeprefix(own) or self.last_line
            if not line.startswith(own):
                sys.stderr.write(f"{self._child.name} | {line}")
                sys.stderr.flush()

    def _ask_until_enough(self) -> None:
        while not self._asked_enough.wait(PROBE_SECONDS):
            self.report = _ask(self._child.http_port) or self.report


def _ask(port: int) -> ReadinessReport | None:
    """What the process on `port` reports; None when it does not answer."""
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
        report = msgspec.json.decode(body, type=ReadinessReport)
    except msgspec.DecodeError:
        report = ReadinessReport()
    return msgspec.structs.replace(report, ready=answer.status == http.HTTPStatus.OK)

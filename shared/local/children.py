"""The child processes of a deployment on this machine: started, watched, restarted and ended.

Children hold the reading end of a pipe whose writing end only this process has: however this process ends, they end.
Two threads serve each child: one passes on its stderr, one asks its `/readyz` until it is ready, and from then on its
`/livez` as the kubelet does. Neither can make the main thread wait: a child that loads may take seconds to answer, and
a signal must end the deployment at once. `restart_policy` decides which child is started when; this file carries the
decisions out and shows the user what happens. Knows neither models nor settings.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from shared.local.console import Service, StartupConsole
from shared.local.restart_policy import GiveUp, RestartPolicy
from shared.primitives.errors import StartError

POLL_SECONDS = 0.1
GRACE_SECONDS = 3.0  # from the signal to SIGKILL; the whole deployment ends within 5
HOST = "127.0.0.1"
PROBE_SECONDS = 0.1  # between two questions
PROBE_SECONDS_MAX = 1.0  # for an answer
KILLS_BYTES = 4096  # of names that are read at a time
LAST_LINES_SECONDS_MAX = 1.0  # to read what an ended process wrote


@dataclass(frozen=True, slots=True)
class Liveness:
    """When a child that was ready counts as hanging; as the chart's liveness probe says it."""

    period_seconds: float = 10.0
    answer_seconds_max: float = 5.0
    failures_max: int = 3  # in a row, since an answer can be late where cores are shared


@dataclass(slots=True)
class Child:
    """What to run: `python -m ROLE ARGUMENTS`, which answers probes on its admin port."""

    name: str
    role: str
    admin_port: int
    arguments: list[str]
    environment: Mapping[str, str]
    inherited: tuple[int, ...] = ()  # descriptors that the arguments name

    @property
    def admin_address(self) -> str:
        """Host and port of its probes and metrics."""
        return f"{HOST}:{self.admin_port}"


class ReadinessReport(msgspec.Struct, frozen=True):
    """What a child answers at `/readyz`. The router's answer may have less."""

    ready: bool = False
    doing: str = "starting"
    facts: dict[str, str | int] = {}


class ChildProcess:
    """One process of a child, from its start to its end. A restarted child is a new one."""

    def __init__(self, child: Child, lifeline: int, liveness: Liveness):
        self.report: ReadinessReport | None = None  # the latest; None: it has not answered yet
        self.hangs = False  # it was ready once, and does not live any more
        self.last_line = ""  # on stderr: why the process could not start
        self._child = child
        self._liveness = liveness
        self._ready = threading.Event()
        self._over = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", child.role, *child.arguments, "--lifeline-fd", str(lifeline)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=child.environment,
            pass_fds=[lifeline, *child.inherited],
            process_group=0,  # Ctrl-C reaches only the parent, which then ends its children in order
        )
        self._relay = threading.Thread(target=self._relay_stderr, daemon=True)
        self._relay.start()
        threading.Thread(target=self._ask, daemon=True).start()

    def status(self) -> int | None:
        """The exit status, or the negative number of the signal that ended the process; None while it runs."""
        status = self._process.poll()
        if status is not None:
            self._stop_asking()
            self._relay.join(LAST_LINES_SECONDS_MAX)
        return status

    def became_ready(self) -> None:
        """The report is not needed any more; from now on the process is asked whether it lives."""
        self._ready.set()

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()

    def interrupt(self) -> None:
        """Make the process end at once, without draining.

        SIGINT does that, but a Python that is still starting would answer it with a traceback. Such a process ends
        by SIGTERM, before SIGINT can reach it.
        """
        self._stop_asking()
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
                # Nobody may read it any more, but the child would wait for ever once the pipe is full.
                with contextlib.suppress(OSError):
                    sys.stderr.write(f"{self._child.name} | {line}")
                    sys.stderr.flush()

    def _stop_asking(self) -> None:
        self._over.set()
        self._ready.set()

    def _ask(self) -> None:
        while not self._ready.wait(PROBE_SECONDS):
            self.report = _readiness(self._child.admin_port) or self.report
        failures = 0
        while failures < self._liveness.failures_max and not self._over.wait(self._liveness.period_seconds):
            answer = _get(self._child.admin_port, "/livez", self._liveness.answer_seconds_max)
            failures = 0 if answer and answer.status == http.HTTPStatus.OK else failures + 1
        self.hangs = not self._over.is_set()


@dataclass(frozen=True, slots=True)
class _ProbeAnswer:
    status: int
    body: bytes


def _get(port: int, path: str, seconds_max: float) -> _ProbeAnswer | None:
    """What the process on `port` answers; None when it does not."""
    connection = http.client.HTTPConnection(HOST, port, timeout=seconds_max)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return _ProbeAnswer(answer.status, answer.read())
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _readiness(port: int) -> ReadinessReport | None:
    """What the process on `port` reports; None when it does not answer."""
    answer = _get(port, "/readyz", PROBE_SECONDS_MAX)
    if answer is None:
        return None
    try:
        report = msgspec.json.decode(answer.body, type=ReadinessReport)
    except msgspec.DecodeError:
        report = ReadinessReport()
    return msgspec.structs.replace(report, ready=answer.status == http.HTTPStatus.OK)


class ChildProcesses:
    """The children of one deployment. The first child is the router."""

    def __init__(
        self,
        children: list[Child],
        console: StartupConsole,
        service: Service,
        liveness: Liveness = Liveness(),
        kills_fd: int = -1,
        grace_seconds: float = GRACE_SECONDS,
    ):
        """`kills_fd`: names of workers come out of it, a line each, that are to be killed; -1: nobody asks.

        `grace_seconds`: from the signal that ends a child to SIGKILL.
        """
        self._kills_fd = kills_fd
        self._grace_seconds = grace_seconds
        self._children = {child.name: child for child in children}
        self._liveness = liveness
        self._console = console
        self._service = service
        self._workers = sum(child.role != "router" for child in children)
        self._policy = RestartPolicy(list(self._children))
        self._running: dict[str, ChildProcess] = {}
        self._stopping = False
        self._began_at = time.monotonic()
        self._announced = False
        self._lifeline, self._held_end = os.pipe()  # the kernel closes the held end when this process ends

    def run(self) -> None:
        """Start, watch and restart until SIGINT or SIGTERM. Raises StartError when a child cannot start."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        try:
            while not self._stopping:
                self._start_due()
                self._kill_hanging()
                self._kill_asked()
                self._notice_ended()
                self._notice_ready()
                self._announce_once()
                time.sleep(POLL_SECONDS)
            self._console.stop_progress()
            self._console.print_line("ending")
        finally:
            self._console.stop_progress()
            self._end_all()

    def _stop(self, *_: object) -> None:
        """Handle a signal. It takes no lock, as an Event would: the thread that it interrupts may hold the lock."""
        self._stopping = True

    def _start_due(self) -> None:
        for name in self._policy.due(time.monotonic()):
            child = self._children[name]
            self._running[name] = ChildProcess(child, self._lifeline, self._liveness)
            self._policy.started(name, time.monotonic())
            self._console.show_progress(name, "starting")

    def _kill_hanging(self) -> None:
        for name, running in self._running.items():
            if running.hangs:
                running.hangs = False
                self._console.print_line(f"{name} hangs: its /livez fails; killing it")
                running.kill()

    def _kill_asked(self) -> None:
        """Kill the workers that the live page has named. Names of at most PIPE_BUF bytes come whole."""
        if self._kills_fd < 0:
            return
        try:
            asked = os.read(self._kills_fd, KILLS_BYTES).decode(errors="replace").split()
        except BlockingIOError:
            return
        for name in asked:
            if (running := self._running.get(name)) and self._children[name].role != "router":
                self._console.print_line(f"{name}: killed from the live page")
                running.kill()

    def _notice_ended(self) -> None:
        for name, running in list(self._running.items()):
            status = running.status()
            if status is None:
                continue
            del self._running[name]
            verdict = self._policy.ended(name, status, time.monotonic())
            how = f"killed by signal {-status}" if status < 0 else f"status {status}"
            if isinstance(verdict, GiveUp):
                raise StartError(f"{name} could not start: {running.last_line or how}")
            self._console.print_line(f"{name} ended ({how}); starting it again in {verdict.seconds:g} s")

    def _notice_ready(self) -> None:
        for name, running in self._running.items():
            report = running.report
            if report is None or self._policy.is_ready(name):
                continue
            if report.ready and report.facts.get("workers_up", self._workers) == self._workers:
                running.became_ready()
                self._policy.became_ready(name)
                self._console.show_choices(name, self._children[name].admin_address, report.facts)
            else:
                self._console.show_progress(name, "waiting for workers" if report.ready else report.doing)

    def _announce_once(self) -> None:
        if not self._announced and self._policy.all_ready():
            self._announced = True
            self._console.show_ready(self._service, time.monotonic() - self._began_at)

    def _end_all(self) -> None:
        for running in self._running.values():
            running.interrupt()
        deadline = time.monotonic() + self._grace_seconds
        for name, running in self._running.items():
            if not running.ended_within(max(0.0, deadline - time.monotonic())):
                self._console.print_line(f"{name} did not end within {self._grace_seconds:g} s: killed")
        os.close(self._lifeline)
        os.close(self._held_end)

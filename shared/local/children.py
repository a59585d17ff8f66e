"""The child processes of a deployment on this machine: started, watched, restarted and ended.

Children hold the reading end of a pipe whose writing end only this process has: however this process ends, they end.
`restart_policy` decides which child is started when; `child_process` is one running child. This file carries the
decisions out and shows the user what happens.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from shared.local.child_process import Child, ChildProcess, Liveness
from shared.local.console import Service, StartupConsole
from shared.local.restart_policy import GiveUp, RestartPolicy
from shared.primitives.errors import StartError

POLL_SECONDS = 0.1
GRACE_SECONDS = 3.0  # from the signal to SIGKILL; the whole deployment ends within 5


class ChildProcesses:
    """The children of one deployment. The first child is the router."""

    def __init__(
        self,
        children: list[Child],
        console: StartupConsole,
        service: Service,
        liveness: Liveness = Liveness(),  # noqa: B008 - frozen
    ):
        self._children = {child.name: child for child in children}
        self._liveness = liveness
        self._console = console
        self._service = service
        self._workers = sum(child.role != "router" for child in children)
        self._policy = RestartPolicy(list(self._children))
        self._running: dict[str, ChildProcess] = {}
        self._stop = threading.Event()
        self._began_at = time.monotonic()
        self._announced = False
        self._lifeline, self._held_end = os.pipe()  # the kernel closes the held end when this process ends

    def run(self) -> None:
        """Start, watch and restart until SIGINT or SIGTERM. Raises StartError when a child cannot start."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._stop.set())
        try:
            while not self._stop.wait(POLL_SECONDS):
                self._start_due()
                self._kill_hanging()
                self._notice_ended()
                self._notice_ready()
                self._announce_once()
            self._console.stop_progress()
            self._console.print_line("ending")
        finally:
            self._console.stop_progress()
            self._end_all()

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
        deadline = time.monotonic() + GRACE_SECONDS
        for name, running in self._running.items():
            if not running.ended_within(max(0.0, deadline - time.monotonic())):
                self._console.print_line(f"{name} did not end within {GRACE_SECONDS:g} s: killed")
        os.close(self._lifeline)
        os.close(self._held_end)

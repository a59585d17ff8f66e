"""The deployment that is abused: `segue up` with two prefill and two decode workers, and what must hold in every case.

One deployment serves the whole suite. The router runs under an address space of 1 GiB (`RLIMIT_AS`), as a pod would
be killed above it: a bound that does not hold ends the router, and every later case shows it. Each case says what it
asserts of memory, of other clients and of streams with the methods here.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2

from tests.abuse.probing import ProbingClient
from tests.abuse.procfs import PeakMemory
from tests.integration.deployments.deployment import LocalDeployment, RunningProcess
from tests.integration.deployments.ranked import RANKED
from tests.integration.deployments.streams import StreamedAnswer, client_of, complete
from tests.waiting import soon, until

MARKER = "zebrafish-7f3a"  # what clients write has it; no record may
ADDRESS_SPACE_BYTES = 1 << 30  # of the router
MIB = 1 << 20
# Until all workers are back after a fault; ends a case that hangs. A worker of ranks is twice as many processes.
HOME_SECONDS_MAX = 180.0 if RANKED else 60.0
STREAM_TOKENS = 240  # long enough to be disturbed in the middle, also on a fast machine
QUIET_PROBES = 50  # before anything is abused
STREAM_SECONDS_MAX = 240.0 if RANKED else 120.0  # ends a case that hangs
BUG = re.compile(  # in a line of the log
    r"Traceback|[Uu]nhandled|exception was never retrieved|was never awaited"
    r'|"event":"(http\.error|answer\.failed|admin\.failed|link\.failed|link\.command_failed|process\.failed)"'
    r'|"event":"http\.request".*"status":500\b'
)
PROMPTS = [f"Chapter {k} of the {MARKER} begins on a ship that" for k in range(4)]
SAMPLED: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 11,
    "max_tokens": STREAM_TOKENS,
    "extra_body": {"ignore_eos": True},
}


class AbusedDeployment:
    """The running deployment, and a client that nobody expects to suffer."""

    def __init__(self, running: LocalDeployment):
        self.running = running
        self.router_pid = 0
        self._failures_before = 0.0  # of routers that were killed
        self.expect_new_router()
        self.others = ProbingClient(running.router_port)
        self.quiet_seconds = self.others.slowest(QUIET_PROBES)
        self.undisturbed = self.stream()

    @property
    def port(self) -> int:
        """Of OpenAI's API."""
        return self.running.router_port

    def router(self) -> RunningProcess:
        """The router's process."""
        return self.running.processes("router")[0]

    def workers(self) -> list[RunningProcess]:
        """All workers."""
        return [process for process in self.running.processes() if process.role != "router"]

    def expect_new_router(self) -> None:
        """From now on the router that runs is the right one; it gets its address space."""
        self.router_pid = self.router().pid
        resource.prlimit(self.router_pid, resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))

    def allowed(self, seconds: float) -> float:
        """Seconds of a promise on this machine: more where it is slower, and a quiet client's longest wait."""
        return soon(seconds) + self.quiet_seconds

    @contextmanager
    def growth_below(self, mib: int, process: RunningProcess | None = None) -> Iterator[None]:
        """The process, by default the router, never has so much more memory than before."""
        memory = PeakMemory((process or self.router()).pid)
        yield
        grown = memory.growth() / MIB
        assert grown <= mib, f"memory grew by {grown:.0f} MiB, allowed are {mib}"

    @contextmanager
    def nobody_suffers(self, mib: int) -> Iterator[None]:
        """The router's memory stays within this growth, and other clients wait no longer than 0.2 s."""
        with self.growth_below(mib), self.others.window():
            yield

    def stream(self) -> list[StreamedAnswer]:
        """Four streams at a time, to their end."""
        return asyncio.run(self._streams(lambda: None))

    @contextmanager
    def undisturbed_streams(self) -> Iterator[None]:
        """Four streams run meanwhile, and get exactly the tokens that they get alone."""
        started = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(lambda: asyncio.run(self._streams(started.set)))
            until(
                lambda: started.is_set() or answers.done(),
                STREAM_SECONDS_MAX,
                "the first tokens of four streams",
            )
            assert not answers.done(), "the streams ended before anything could disturb them"
            yield
            assert answers.result(STREAM_SECONDS_MAX) == self.undisturbed

    async def _streams(self, on_started: Callable[[], None]) -> list[StreamedAnswer]:
        """All prompts; `on_started` is called when each has some text."""
        pieces = Counter[str]()

        async with client_of(self.running.url) as client:

            async def one(prompt: str) -> StreamedAnswer:
                def count() -> None:
                    pieces[prompt] += 1
                    if len(pieces) == len(PROMPTS):
                        on_started()

                return await complete(client, prompt, count, **SAMPLED)

            return list(await asyncio.gather(*map(one, PROMPTS)))

    def kill(self, process: RunningProcess, number: int) -> None:
        """Send a signal to a process of the deployment."""
        os.kill(process.pid, number)

    def slots_used(self, worker: RunningProcess) -> float:
        """Requests on this worker's device."""
        return self.running.metrics(worker).get("segue_slots_used", 0.0)

    def all_home(self) -> None:
        """Wait until every worker is linked and nothing is held."""
        until(
            lambda: len(self.running.processes()) == self.running.workers + 1,
            HOME_SECONDS_MAX,
            "the return of every process",
        )
        until(lambda: self._settled(), HOME_SECONDS_MAX, "linked workers that hold nothing")

    def _settled(self) -> bool:
        try:
            return self.running.all_linked() and not self.running.held()
        except httpx2.TransportError:
            return False

    def series(self) -> set[tuple[str, str]]:
        """The metric series of all processes: the process that shows it, and its name with its labels."""
        return {
            (process.uid, series)
            for process in self.running.processes()
            for series in self.running.metrics(process)
        }

    def failures(self) -> float:
        """Requests that were answered with 500, of all routers that have run."""
        return self._failures_before + self.running.total("router", "segue_requests_total{outcome=500}")

    def kill_router(self) -> None:
        """Kill it, and keep what its metrics said of failures."""
        self._failures_before = self.failures()
        self.kill(self.router(), signal.SIGKILL)

    def nothing_held_within(self, seconds: float) -> None:
        """Everything is given back within this time."""
        until(lambda: not self.running.held(), self.allowed(seconds), "everything given back")

    def log(self) -> list[str]:
        """All lines that the deployment has written."""
        return self.running.command.read_lines()

    def warnings(self) -> list[str]:
        """Those lines that are warnings or worse."""
        return [line for line in self.log() if re.search(r'"level":"(warning|error|critical)"', line)]

    def bugs(self) -> list[str]:
        """Lines that only a bug of ours writes: a handler or a loop that raised, or an answer with 500."""
        return [line[:500] for line in self.log() if BUG.search(line)]

    def admin_url(self, process: RunningProcess, path: str) -> str:
        """Where a process shows its metrics."""
        return f"http://127.0.0.1:{process.admin_port}{path}"

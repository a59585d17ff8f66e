"""A server under measurement: started with its children, asked what it costs, frozen while another's turn is, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

from tests.benchmarks.client.client import connected
from tests.benchmarks.client.errors import BenchError
from tests.benchmarks.client.measuring import measure, warm_up
from tests.benchmarks.client.report import RunResult
from tests.benchmarks.client.scenarios import Scenario, Size
from tests.benchmarks.peers import Contender
from tests.integration.deployments.deployment import free_port
from tests.waiting import comes_true

START_SECONDS_MAX = 600.0
END_SECONDS_MAX = 30.0
IDLE_LOOK_SECONDS = 5.0
IDLE_TURN_SECONDS = 1.0
IDLE_SECONDS_MAX = 30.0  # between two turns
BUSY_TURN_MAX = 0.15  # cores; servers and the machine itself take this much at rest
IDLE_SHARE_MAX = 0.05  # of one core; who takes more while idle is frozen
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class BenchServer:
    """One contender, running."""

    def __init__(self, contender: Contender, log: Path):
        self.contender = contender
        self.log = log
        self.port = free_port()
        self.idle_share = 0.0  # of one core
        self.pss_bytes = 0
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                contender.command(self.port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **contender.environment},
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        """Its API."""
        return f"http://127.0.0.1:{self.port}/v1"

    def wait_until_ready(self) -> None:
        """Return once it has answered a request. Raises BenchError with the end of its log when it ends instead."""
        ready = comes_true(lambda: self._process.poll() is not None or self._answers(), START_SECONDS_MAX)
        if not ready or self._process.poll() is not None:
            tail = self.log.read_text(errors="replace").splitlines()[-20:]
            raise BenchError(
                "\n".join([f"{self.contender.title} does not start; the end of its log:", *tail])
            )

    def look_at_idleness(self) -> None:
        """Measure how much CPU it takes without any request."""
        start, before = monotonic(), self._cpu_seconds()
        threading.Event().wait(IDLE_LOOK_SECONDS)
        self.idle_share = (self._cpu_seconds() - before) / (monotonic() - start)

    def run(self, scenario: Scenario, size: Size, seed: str) -> RunResult:
        """Measure one scenario; nothing but this server may be busy."""
        return asyncio.run(self._run(scenario, size, seed))

    async def _run(self, scenario: Scenario, size: Size, seed: str) -> RunResult:
        async with connected(self.url, "") as client:
            await warm_up(client)
            return await measure(client, scenario, size, seed)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Its turn: one that spins while idle runs only here."""
        self.signal(signal.SIGCONT)
        yield
        self.rest()

    def rest(self) -> None:
        """Its turn is over."""
        if self.idle_share > IDLE_SHARE_MAX:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """To all its processes."""
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def remember_memory(self) -> None:
        """Its memory now, pages shared by processes counted once (PSS)."""
        found = 0
        for pid in self._pids():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                found += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        self.pss_bytes = max(self.pss_bytes, found)

    def close(self) -> None:
        """End it and everything that it started."""
        pids = self._pids()
        self.signal(signal.SIGCONT)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS_MAX)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        async def ask() -> None:
            async with connected(self.url, "") as client:
                await warm_up(client)

        try:
            asyncio.run(ask())
        except BenchError:
            return False
        return True

    def _pids(self) -> list[int]:
        """The process and all below it."""
        found, unseen = [], [self._process.pid]
        while unseen:
            found.append(pid := unseen.pop())
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    unseen += map(int, (task / "children").read_text().split())
        return found

    def _cpu_seconds(self) -> float:
        ticks = 0
        for pid in self._pids():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / TICKS_PER_SECOND


def busy_cores(seconds: float = IDLE_LOOK_SECONDS) -> float:
    """How many cores of this machine are at work, by anybody; a measurement needs a quiet machine."""

    def read() -> tuple[int, int]:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]  # idle and waiting for a disk

    start_ticks, start_idle = read()
    threading.Event().wait(seconds)
    ticks, idle = read()
    share = 1.0 - (idle - start_idle) / max(1, ticks - start_ticks)
    return share * (os.cpu_count() or 1)


def wait_until_idle(say: Callable[[str], None]) -> None:
    """Some servers compute on for seconds when their last answer has ended: it must not fall into another's turn."""
    deadline = monotonic() + IDLE_SECONDS_MAX
    while (busy := busy_cores(IDLE_TURN_SECONDS)) > BUSY_TURN_MAX:
        if monotonic() >= deadline:
            say(
                f"{busy:.2f} cores are still at work {IDLE_SECONDS_MAX:.0f} s after a turn: the next may suffer"
            )
            return

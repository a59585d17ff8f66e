"""What a large fleet costs a router that has no room for anybody: real links, shell and core.

    python -m tests.benchmarks.fleet [--prefill 200] [--decode 400] [--loads 6000] [--room 0] [--waiting 1024]
        [--seconds 60]

The workers are of another process, so that CPU time is the router's alone, its link thread and ZMQ's among it. They
tell their load and take no request; the requests wait. A share of the loads brings room on decode workers, for which
the core looks through all that waits. Printed are the share of one core, how late the event loop is,
and the sessions that ended.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from router.config import RouterConfig
from router.core.dispatch import RouterCore
from router.core.effects import ClientRequest
from router.shell import RouterShell
from shared.links.keys import read_keys
from shared.links.sockets import RouterLinks
from shared.process.role_main import raise_descriptor_limit
from shared.wire.messages import WORKER_ROLES, Hello
from shared.wire.sampling_params import SamplingParams
from tests.benchmarks.router import SilentSink
from tests.link_keys import write_new_keys
from tests.link_settings import link_settings

LOOK_SECONDS = 0.005  # between two looks at the clock of the loop
TENANTS = 8
UP_SECONDS_MAX = 120.0


class FleetBench:
    """A router that dials a fleet, and what it costs."""

    def __init__(self, addresses: list[str], keys: Path):
        settings = RouterConfig(served_model_name="m", waiting_seconds_max=3600, max_queued_requests=100_000)
        self.core = RouterCore(settings, asyncio.get_running_loop().time())
        hello = Hello(session=0, role="router", uid="router", epoch=1)
        self.links = RouterLinks(
            read_keys(str(keys / "router.pem"), "router"),
            hello,
            link_settings(),
            on_ready=lambda: self.shell.links_ready(),
            write_note=lambda _: None,
        )
        self.shell = RouterShell(self.core, self.links)
        self._addresses = addresses

    async def dial(self) -> float:
        """Dial all workers; returns the seconds until the last one was up."""
        began = time.monotonic()
        for address in self._addresses:
            self.links.connect(address)
        while len(self.core.fleet.workers) < len(self._addresses):
            if time.monotonic() > began + UP_SECONDS_MAX:
                sys.exit(f"only {len(self.core.fleet.workers)} workers came up in {UP_SECONDS_MAX:g} s")
            await pause(0.1)
        return time.monotonic() - began

    def submit(self, waiting: int) -> None:
        """Requests of several tenants and many lengths, none of which finds room."""
        for number in range(waiting):
            request = ClientRequest(
                rid=f"request-{number}",
                model="m",
                token_ids=tuple(range(64 + number * 37 % 1024)),
                params=SamplingParams(max_new_tokens=100, seed=0),
                tenant=f"tenant-{number % TENANTS}",
            )
            self.shell.submit(request, SilentSink())

    def loads(self) -> int:
        """How many loads the core was given."""
        return sum(worker.load_number for role in WORKER_ROLES for worker in self.core.fleet.of_role(role))

    async def measure(self, seconds: float) -> dict[str, str]:
        """Let it run for `seconds`; returns what is printed."""
        lags: list[float] = []
        loads, ended = self.loads(), self.links.counters.sessions_ended
        began, cpu, threads = time.monotonic(), time.process_time(), _thread_seconds()
        while (now := time.monotonic()) < began + seconds:
            await pause(LOOK_SECONDS)
            lags.append(max(0.0, time.monotonic() - now - LOOK_SECONDS))
        wall, lags = time.monotonic() - began, sorted(lags)
        return {
            "loads given to the core": f"{(self.loads() - loads) / wall:.0f}/s",
            "requests waiting": str(self.core.requests_by_state["waiting"]),
            "sessions ended": str(self.links.counters.sessions_ended - ended),
            "CPU": f"{(time.process_time() - cpu) / wall:.1%} of a core",
            "… of its threads": ", ".join(
                f"{name} {(spent - threads.get(name, 0.0)) / wall:.1%}"
                for name, spent in _thread_seconds().items()
            ),
            "loop lag p50": f"{lags[len(lags) // 2] * 1000:.1f} ms",
            "loop lag p99": f"{lags[len(lags) * 99 // 100] * 1000:.1f} ms",
            "loop lag max": f"{lags[-1] * 1000:.1f} ms",
        }


async def pause(seconds: float) -> None:
    """Give the loop its turns for so long."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.call_later(seconds, ended.set_result, None)
    await ended


def _thread_seconds() -> dict[str, float]:
    """CPU seconds of each thread of this process so far, by its name; Linux only."""
    seconds: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        head, _, rest = (task / "stat").read_text().rpartition(")")
        name, fields = head.partition("(")[2], rest.split()
        ticks = int(fields[11]) + int(fields[12])
        seconds[name] = seconds.get(name, 0.0) + ticks / os.sysconf("SC_CLK_TCK")
    return seconds


async def _run(addresses: list[str], keys: Path, waiting: int, seconds: float) -> None:
    bench = FleetBench(addresses, keys)
    try:
        up_seconds = await bench.dial()
        while any(not worker.load_number for worker in bench.core.fleet.workers.values()):
            await pause(0.1)  # none takes a request once it has told its load
        bench.submit(waiting)
        figures = await bench.measure(seconds)
        for name, figure in {"workers": f"{len(addresses)}, up in {up_seconds:.1f} s", **figures}.items():
            sys.stdout.write(f"{name:<24} {figure}\n")
    finally:
        bench.shell.close()
        bench.links.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.fleet", description="A router with a large fleet"
    )
    parser.add_argument("--prefill", type=int, default=200, help="prefill workers")
    parser.add_argument("--decode", type=int, default=400, help="decode workers")
    parser.add_argument("--loads", type=int, default=6000, help="loads that all workers tell in a second")
    parser.add_argument("--room", type=float, default=0.0, help="share of decode's loads that bring room")
    parser.add_argument("--waiting", type=int, default=1024, help="requests that wait for a prefill worker")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    raise_descriptor_limit()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        write_new_keys(keys)
        numbers = map(str, (options.prefill, options.decode, options.loads, options.room))
        command = [sys.executable, "-m", "tests.benchmarks.fleet_workers", str(keys / "worker.pem"), *numbers]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            addresses = [process.stdout.readline().strip() for _ in range(options.prefill + options.decode)]
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_run(addresses, keys, options.waiting, options.seconds))
            process.communicate()


if __name__ == "__main__":
    main()

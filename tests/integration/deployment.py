"""A real deployment for tests: `segue up` as a child process, found out about only as an operator could.

Processes are found among the children by their command lines, figures are read from `/metrics`. Nothing here knows the
inside of any process.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import until

START_SECONDS_MAX = 120.0


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the deployment."""

    pid: int
    role: str
    uid: str
    http_port: int


@dataclass
class Deployment:
    """A running `segue up`."""

    launcher: subprocess.Popen[str]
    router_port: int
    client: openai.OpenAI  # OpenAI's own, which must not paper over a failure by trying again
    output: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where the router listens."""
        return f"http://127.0.0.1:{self.router_port}"

    def processes(self, role: str | None = None) -> list[Process]:
        """The live children of `segue up`, by uid."""
        found = [process for pid in _children(self.launcher.pid) if (process := _describe(pid))]
        return sorted((p for p in found if role in (None, p.role)), key=lambda p: p.uid)

    def metrics(self, process: Process) -> dict[str, float]:
        """Everything at `/metrics`, as `name{label=value,…}` without the role."""
        port = self.router_port if process.role == "router" else process.http_port
        return read_metrics(f"http://127.0.0.1:{port}/metrics")

    def total(self, role: str, name: str) -> float:
        """A metric summed over the processes of a role."""
        return sum(self.metrics(process).get(name, 0.0) for process in self.processes(role))

    def held(self) -> dict[str, float]:
        """What requests still hold anywhere; empty when nothing does."""
        held: dict[str, float] = {}
        for process in [*self.processes("prefill"), *self.processes("decode")]:
            for name, value in self.metrics(process).items():
                in_use = re.match(r"segue_pages\{state=(owned|arriving|copying|quarantined)\}", name)
                if value and (in_use or name in ("segue_leases", "segue_slots_used")):
                    held[f"{process.uid} {name}"] = value
        return held


def read_metrics(url: str) -> dict[str, float]:
    """All samples of a Prometheus page."""
    samples = {}
    for family in text_string_to_metric_families(httpx.get(url, timeout=10.0).text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "role")
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


@contextmanager
def deployment(*flags: str) -> Iterator[Deployment]:
    """`segue up` with these flags, ready, and gone afterwards."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "TMPDIR": folder}
        launcher = subprocess.Popen(
            [str(Path(sys.executable).with_name("segue")), "up", "--router-port", str(port), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
        )
        base_url = f"http://127.0.0.1:{port}/v1"
        client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=180.0)
        running = Deployment(launcher, port, client)
        reader = threading.Thread(target=_read, args=(launcher, running.output), daemon=True)
        reader.start()
        try:
            until(lambda: launcher.poll() is not None or _ready(running), START_SECONDS_MAX, "readiness")
            if launcher.poll() is not None:
                reader.join()
                raise AssertionError("".join(running.output))
            yield running
        finally:
            client.close()
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(10)
            reader.join(5)
            if launcher.stdout:
                launcher.stdout.close()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read(launcher: subprocess.Popen[str], output: list[str]) -> None:
    assert launcher.stdout is not None
    output.extend(launcher.stdout)


def _ready(running: Deployment) -> bool:
    return any("curl" in line for line in running.output)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _describe(pid: int) -> Process | None:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return None
    if "-m" not in words:
        return None

    def flag(name: str) -> str:
        return words[words.index(name) + 1] if name in words else ""

    return Process(pid, words[words.index("-m") + 1], flag("--uid"), int(flag("--http-port") or 0))

"""What clients can take from a router process: its memory, its time, its descriptors."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from router.listener.connections import DESCRIPTOR_RESERVE
from tests.integration.routers.linked_worker import LinkedWorker
from tests.link_keys import write_new_keys
from tests.unit.router.tiny_model import write_folder
from tests.waiting import soon, until

GROWN_BYTES_MAX = 32 << 20
DESCRIPTORS = 1100  # of the router that runs out of them
BODY = {"model": "tiny", "prompt": "fox", "stream": True}


class RouterProcess:
    """A router process with two workers in this one."""

    def __init__(self, root: Path, *, descriptors: int | None = None):
        write_new_keys(root / "keys")
        folder = write_folder(root / "tiny")
        self._keys = root / "keys"
        self.prefill = LinkedWorker("prefill", "p", self._keys / "worker.pem", hands_over=True)
        self.decode = LinkedWorker("decode", "d", self._keys / "worker.pem")
        with socket.socket() as holder, socket.socket() as admin_holder:
            for each in (holder, admin_holder):
                each.bind(("127.0.0.1", 0))
            self.port, admin_port = holder.getsockname()[1], admin_holder.getsockname()[1]
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        self.url = f"http://127.0.0.1:{self.port}"
        workers = f"prefill=127.0.0.1:{self.prefill.port},decode=127.0.0.1:{self.decode.port}"
        command = [sys.executable, "-m", "router", "--model", str(folder), "--port", str(self.port)]
        command += [
            "--link-keys-file",
            str(self._keys / "router.pem"),
            "--workers",
            workers,
            "--admin-port",
            str(admin_port),
            "--keepalive-seconds",
            "0.1",
        ]

        def limit() -> None:
            if descriptors:
                resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

        self._log = root / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, preexec_fn=limit)
        until(lambda: self.process.poll() is not None or self._ready(), 60, "readiness")

    def _ready(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/health").status_code == 200
        except httpx2.TransportError:
            return False

    def new_decode(self) -> None:
        """The decode worker dies, and another comes up at its address."""
        port = self.decode.port
        self.decode.close()
        self.decode = LinkedWorker("decode", "d", self._keys / "worker.pem", port=port)

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(20)
        self.prefill.close()
        self.decode.close()

    def log(self) -> str:
        return self._log.read_text()

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (kib,) = re.findall(r"VmRSS:\s+(\d+) kB", status)
        return int(kib) << 10

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)


@pytest.fixture(scope="module", autouse=True)
def many_descriptors() -> None:
    """This process has a descriptor for each of its connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    running = RouterProcess(tmp_path_factory.mktemp("hostile"))
    yield running
    running.close()
    assert "Traceback" not in running.log()


def watched(router: RouterProcess, attack: Callable[[], None]) -> tuple[int, float]:
    """The bytes by which the router grew during the attack, and the longest wait of another client in seconds."""
    peak, longest = 0, 0.0
    before = router.resident_bytes()
    attacking = threading.Thread(target=attack)
    with httpx2.Client(base_url=router.url, timeout=30) as client:
        client.get("/health")
        attacking.start()
        while attacking.is_alive():
            began = time.monotonic()
            assert client.get("/health").status_code == 200
            longest = max(longest, time.monotonic() - began)
            peak = max(peak, router.resident_bytes())
            attacking.join(0.02)
    return peak - before, longest


def send_all(router: RouterProcess, parts: Iterator[bytes]) -> None:
    """Send until the router has had enough."""
    with router.connect() as connection, contextlib.suppress(ConnectionError, TimeoutError):
        for part in parts:
            connection.sendall(part)


def headers() -> Iterator[bytes]:
    yield b"GET /health HTTP/1.1\r\n"
    for _ in range(64):
        yield b"a: b\r\n" * ((1 << 20) // 6)


def one_header() -> Iterator[bytes]:
    yield b"GET /health HTTP/1.1\r\na: "
    for _ in range(96):
        yield b"x" * (1 << 20)


def trailers() -> Iterator[bytes]:
    yield b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
    for _ in range(64):
        yield b"a: b\r\n" * ((1 << 20) // 6)


@pytest.mark.parametrize("attack", [headers, one_header, trailers])
def test_megabytes_of_head_cost_neither_memory_nor_the_time_of_others(
    router: RouterProcess, attack: Callable[[], Iterator[bytes]]
) -> None:
    grown, longest = watched(router, lambda: send_all(router, attack()))
    assert grown <= GROWN_BYTES_MAX
    assert longest <= soon(0.2)


def test_two_thousand_idle_connections_cost_little(router: RouterProcess) -> None:
    before = router.resident_bytes()
    with ExitStack() as connections:
        for _ in range(2000):
            connections.enter_context(router.connect())
        until(lambda: connections_open(router) >= 2000, 20, "their acceptance")
        assert httpx2.get(f"{router.url}/health").status_code == 200
        assert router.resident_bytes() - before <= GROWN_BYTES_MAX
    until(lambda: connections_open(router) < 10, 20, "their end")


def connections_open(router: RouterProcess) -> float:
    page = httpx2.get(f"{router.admin_url}/metrics").text
    (found,) = re.findall(r"segue_http_connections{.*} ([\d.]+)", page)
    return float(found)


def test_streams_live_when_descriptors_run_out_and_a_worker_is_dialed_again(tmp_path: Path) -> None:
    router = RouterProcess(tmp_path, descriptors=DESCRIPTORS)
    try:
        with httpx2.stream("POST", f"{router.url}/v1/completions", json=BODY, timeout=30) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            with ExitStack() as idle:
                kept = httpx2.Client(base_url=router.url)
                idle.enter_context(kept)
                kept.get("/health")
                for _ in range(DESCRIPTORS):
                    idle.enter_context(router.connect())
                until(lambda: _refused(router) >= 100, 20, "connections refused for their descriptors")
                router.new_decode()
                until(lambda: router.decode.routers == 1, 30, "the link to the new worker")
                assert _used(router) <= DESCRIPTORS - DESCRIPTOR_RESERVE + 64, "the reserve is left to links"
                assert any(next(lines).startswith(":") for _ in range(100)), "the stream lives"
        assert router.process.poll() is None
        assert "Traceback" not in router.log()
    finally:
        router.close()


def _used(router: RouterProcess) -> int:
    return len(list(Path(f"/proc/{router.process.pid}/fd").iterdir()))


def _refused(router: RouterProcess) -> float:
    page = httpx2.get(f"{router.admin_url}/metrics").text
    (found,) = re.findall(r'segue_http_connections_ended_total{cause="descriptors".*} ([\d.]+)', page)
    return float(found)

"""Probes of a worker: alive while the loop beats, ready when it says so, answered beside it."""

from __future__ import annotations

import json
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from shared.errors import StartError
from shared.process import gauges
from shared.process.health import Health
from shared.process.metrics import Metrics
from shared.process.probes import Probes
from tests.waiting import until


class HandClock:
    """A clock that a test moves by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def health(clock: HandClock) -> Health:
    return Health(loop_seconds_max=10.0, clock=clock)


@pytest.fixture
def probes(health: Health) -> Iterator[Probes]:
    metrics = Metrics("decode")
    metrics.set(gauges.LEASES, 3)
    probes = Probes("127.0.0.1", 0, health, metrics)
    yield probes
    probes.close()


def get(probes: Probes, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{probes.port}{path}", timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_a_worker_is_alive_while_loading_and_while_its_loop_beats(
    probes: Probes, health: Health, clock: HandClock
) -> None:
    clock.now += 1000
    assert get(probes, "/livez")[0] == 200
    health.beat()
    clock.now += 9
    assert get(probes, "/livez")[0] == 200
    clock.now += 2
    assert get(probes, "/livez")[0] == 503
    health.beat()
    assert get(probes, "/livez")[0] == 200


def test_readiness_says_why_not_and_what_was_chosen(probes: Probes, health: Health) -> None:
    health.doing = "loading weights"
    status, body = get(probes, "/readyz")
    assert (status, json.loads(body)["doing"]) == (503, "loading weights")
    health.facts = {"device": "cpu", "pages": 64}
    health.become_ready()
    status, body = get(probes, "/readyz")
    assert (status, json.loads(body)["facts"]) == (200, {"device": "cpu", "pages": 64})
    health.become_unready("draining")
    assert get(probes, "/readyz")[0] == 503


def test_metrics_are_served_and_nothing_else(probes: Probes) -> None:
    status, body = get(probes, "/metrics")
    assert status == 200
    assert b'segue_leases{role="decode"} 3.0' in body
    assert get(probes, "/etc/passwd")[0] == 404


def test_a_port_in_use_is_one_sentence(health: Health) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"127.0.0.1:{port}.*in use"):
            Probes("127.0.0.1", port, health, Metrics("decode"))


class SlowHealth(Health):
    """A health whose report takes until a test allows it."""

    def __init__(self) -> None:
        super().__init__(loop_seconds_max=10.0)
        self.asked, self.allowed = threading.Event(), threading.Event()

    def report(self) -> bytes:
        self.asked.set()
        assert self.allowed.wait(10)
        return super().report()


def test_a_probe_that_hangs_up_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    health = SlowHealth()
    probes = Probes("127.0.0.1", 0, health, Metrics("decode"))
    with socket.create_connection(("127.0.0.1", probes.port)) as impatient:
        impatient.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
        impatient.sendall(b"GET /readyz HTTP/1.1\r\n\r\n")
        assert health.asked.wait(10)
    health.allowed.set()
    until(
        lambda: not any("process_request" in thread.name for thread in threading.enumerate()),
        10,
        "the answer",
    )
    probes.close()
    assert capfd.readouterr().err == ""

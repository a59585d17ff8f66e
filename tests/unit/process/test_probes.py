"""Probes: alive while the loop beats, ready when the process says so, answered beside it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from shared.process import gauges
from shared.process.admin_port import AdminPort
from shared.process.health import Health, probe_pages
from shared.process.metrics import Metrics


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
def probes(health: Health) -> Iterator[AdminPort]:
    metrics = Metrics("decode")
    metrics.set(gauges.LEASES, 3)
    probes = AdminPort("127.0.0.1", 0, probe_pages(health, metrics))
    yield probes
    probes.close()


def get(probes: AdminPort, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{probes.port}{path}", timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_a_worker_is_alive_while_loading_and_while_its_loop_beats(
    probes: AdminPort, health: Health, clock: HandClock
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


def test_readiness_says_why_not_and_what_was_chosen(probes: AdminPort, health: Health) -> None:
    health.doing = "loading weights"
    status, body = get(probes, "/readyz")
    assert (status, json.loads(body)["doing"]) == (503, "loading weights")
    health.facts = {"device": "cpu", "pages": 64}
    health.become_ready()
    status, body = get(probes, "/readyz")
    assert (status, json.loads(body)["facts"]) == (200, {"device": "cpu", "pages": 64})
    health.become_unready("draining")
    assert get(probes, "/readyz")[0] == 503


def test_metrics_are_served_and_nothing_else(probes: AdminPort) -> None:
    status, body = get(probes, "/metrics")
    assert status == 200
    assert b'segue_leases{role="decode"} 3.0' in body
    assert get(probes, "/etc/passwd")[0] == 404


def test_a_scraper_gets_the_format_that_it_asks_for(probes: AdminPort) -> None:
    url = f"http://127.0.0.1:{probes.port}/metrics"
    for accept, kind, end in (
        ("application/openmetrics-text", "openmetrics-text", b"# EOF\n"),
        ("*/*", "plain", b"\n"),
    ):
        with urllib.request.urlopen(
            urllib.request.Request(url, headers={"Accept": accept}), timeout=5
        ) as answer:
            assert answer.headers.get_content_subtype() == kind
            assert answer.read().endswith(end)

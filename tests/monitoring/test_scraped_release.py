"""Prometheus scrapes a release under load: calm minutes fire nothing, an incident fires its own alert and no other.

    SEGUE_CALM_SECONDS=600 python -m pytest tests/monitoring/test_scraped_release.py  # with ten calm minutes

In the end every query of the dashboard has an answer. Rules are the chart's. Their windows of minutes are ten seconds
here, and each alert waits for three (`monitoring.rules.for`); what they compare with is the chart's, but for latencies,
of which a busy machine promises none. What has fired is what Prometheus has recorded: an alert that still fires when
the next incident begins is no part of that one.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from shared.links.keys import parse_keys
from shared.process.api_keys import key_line, new_key
from tests.integration.links.watched_links import stranger
from tests.integration.routers.slice_server import ServedPod
from tests.link_keys import new_keys
from tests.metric_pages import samples_of
from tests.monitoring.clients import Clients
from tests.monitoring.dashboard import dashboard
from tests.monitoring.pods import Pods, RunningPod, free_ports, release
from tests.monitoring.prometheus import Prometheus, prometheus
from tests.monitoring.rendered import pod_monitor
from tests.waiting import comes_true, until

CALM_SECONDS = float(os.environ.get("SEGUE_CALM_SECONDS", "180" if os.environ.get("CI") else "30"))
WINDOW_SECONDS = 10
FIRE_SECONDS_MAX = 60
pytestmark = [pytest.mark.timeout(600 + CALM_SECONDS), pytest.mark.long]
NEVER_SLOW = tuple(f"monitoring.slo.{name}=600" for name in ("ttftSeconds", "itlSeconds", "loopLagSeconds"))
KEYS = {"shop": new_key(), "batch": new_key()}
LINES = f"{key_line('shop', KEYS['shop'])}\n{key_line('batch', KEYS['batch'])} rpm=1\n"


@dataclass
class Watched:
    """The release, the Prometheus that scrapes it, and when which incident was."""

    pods: Pods
    prometheus: Prometheus
    clients: Clients
    keys: Path
    began_at: float = field(default_factory=time.time)
    incidents: dict[str, tuple[float, float]] = field(default_factory=dict)

    def start(self, *roles: str) -> None:
        self.pods.start(*roles)
        self.prometheus.find_pods()

    def delete(self, pod: RunningPod, number: signal.Signals = signal.SIGTERM) -> None:
        self.pods.delete(pod, number)
        self.prometheus.find_pods()

    def samples(self, pod: RunningPod) -> dict[str, float]:
        return samples_of(
            httpx2.get(f"http://127.0.0.1:{pod.admin_port}/metrics", timeout=10.0, verify=False).text
        )

    def workers_linked(self) -> float:
        [router] = self.pods.of_role("router")
        return sum(value for name, value in self.samples(router).items() if name.startswith("segue_workers{"))

    @contextmanager
    def incident(self, alert: str) -> Iterator[None]:
        """What happens in the block makes this alert fire, and no other for the first time."""
        start = time.time()
        yield
        fired: set[str] = set()

        def look() -> bool:
            fired.update(self.prometheus.first_fired(start, time.time()))
            return alert in fired

        assert comes_true(look, FIRE_SECONDS_MAX), f"{alert} has not fired; {fired} have"
        self.incidents[alert] = start, time.time()

    def let_pass(self, seconds: float) -> None:
        """Let Prometheus scrape and judge for so long: what is asked is what it sees of this time."""
        start = time.time()
        until(lambda: self.prometheus.judged_at() >= start + seconds, seconds + 60, f"{seconds} s of scrapes")

    def until_linked(self, workers: int) -> None:
        until(lambda: self.workers_linked() == workers, 60, f"links to {workers} workers")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    keys = folder / "api-keys"
    keys.write_text(LINES, encoding="utf-8")
    with (
        release(folder, keys, "prefill", "decode", "decode") as pods,
        prometheus(
            folder, pods, pod_monitor(), f"{WINDOW_SECONDS}s", "monitoring.rules.for=3s", *NEVER_SLOW
        ) as found,
    ):
        [router] = pods.of_role("router")
        until(
            lambda: found.values("sum(segue_ready) == 4", time.time() - 5, time.time()),
            60,
            "scrapes of all pods",
        )
        until(lambda: not found.firing(), 60, "the end of what fires before the first scrape")
        yield Watched(pods, found, Clients(f"http://127.0.0.1:{router.port}", KEYS["shop"]), keys)


def test_nothing_fires_in_calm_minutes_nor_while_pods_are_replaced_and_prefill_is_scaled_to_zero(
    watched: Watched,
) -> None:
    with watched.clients.load(3, pause_seconds=1.0) as statuses:
        until(lambda: len(statuses) >= 6, 60, "six answers")
        watched.let_pass(CALM_SECONDS)
        watched.start("decode")
        watched.delete(watched.pods.of_role("decode")[0])  # drains
        watched.until_linked(3)
        watched.delete(watched.pods.of_role("prefill")[0])
        before = len(statuses)
        until(lambda: len(statuses) >= before + 6, 60, "six answers of decode workers alone")
        watched.let_pass(2 * WINDOW_SECONDS)
        watched.start("prefill")
        watched.until_linked(3)
    assert set(statuses) == {200}
    assert watched.prometheus.unhealthy_rules() == []
    until(
        lambda: watched.prometheus.labels_of_pods() == set(watched.pods.running),
        30,
        "all pods, by their names",
    )
    assert watched.prometheus.first_fired(watched.began_at, time.time()) == {}


def test_an_exemplar_names_a_request_that_its_router_knows(watched: Watched) -> None:
    [router] = watched.pods.of_role("router")
    for histogram in ("segue_ttft_seconds", "segue_request_seconds"):
        shown = watched.prometheus.ask(
            "query_exemplars", query=f"{histogram}_bucket", start=watched.began_at, end=time.time()
        )
        [series, *_] = shown
        assert series["seriesLabels"]["pod"] == router.name
        rid = series["exemplars"][-1]["labels"]["request_id"]
        found = httpx2.get(f"http://127.0.0.1:{router.admin_port}/debug/requests/{rid}", verify=False)
        assert found.status_code == 200, found.text


def test_each_incident_fires_its_own_alert(watched: Watched) -> None:
    clients, pods = watched.clients, watched.pods
    with watched.incident("SegueStreamsLoseWorkers"), clients.streams(16, tokens=400):
        busiest = until_streaming(watched, rows=6)
        watched.delete(busiest, signal.SIGKILL)
    [worker, *_] = pods.of_role("decode")
    with watched.incident("SegueStrangerKnocks"), knocking(watched, worker):
        until(lambda: refused(watched, worker), 30, "a refusal")
    with watched.incident("SegueApiKeysUnread"):
        watched.keys.write_text(LINES + "no key\n", encoding="utf-8")
    watched.keys.write_text(LINES, encoding="utf-8")
    with watched.incident("SegueRequestsWrong"):
        for _ in range(40):
            assert clients.ask(body=b'{"model": "smollm2", "prompt": ') == 400
    watched.let_pass(WINDOW_SECONDS)  # the wrong ones are out of it
    with watched.incident("SegueRejects"):
        statuses = [clients.ask(key=KEYS["batch"], words=20, tokens=2) for _ in range(20)]
        assert statuses.count(429) >= 18
    for pod in pods.of_role("decode"):
        watched.delete(pod)
    with clients.streams(3, tokens=20) as held:
        with watched.incident("SegueRoleMissing"):
            pass
        watched.start("decode", "decode")
        assert [each.result() for each in held] == [200] * 3
    watched.until_linked(3)
    [nobodys_port] = free_ports(1)
    with watched.incident("SegueWorkersUnlinked"):
        # Ready, and behind a policy that lets no router in
        pods.server.put(ServedPod("segue-decode-out", "decode", "127.0.0.1", nobodys_port, release="segue"))
    pods.server.remove("segue-decode-out")
    [router] = pods.of_role("router")
    with watched.incident("SegueNoRouterReady"):
        watched.delete(router, signal.SIGKILL)
    fired = watched.prometheus.first_fired(watched.began_at, time.time())
    during = {
        alert: {name for name, at in fired.items() if start <= at <= end}
        for alert, (start, end) in watched.incidents.items()
    }
    assert during == {alert: {alert} for alert in watched.incidents}
    assert set(fired) == set(watched.incidents)


def test_every_query_of_the_dashboard_has_an_answer(watched: Watched) -> None:
    """Over all the time: some are numbers only while something happens."""
    assert watched.incidents, "the incidents were not made: run the whole file"
    end = time.time()
    empty = [
        (title, expression)
        for title, expression in queries()
        if not watched.prometheus.values(expression, watched.began_at, end, step=2)
    ]
    assert empty == []


def queries() -> Iterator[tuple[str, str]]:
    """All that Grafana asks for the dashboard: its panels, its annotations, and the choices above them."""
    shown = dashboard()
    for panel in shown["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], asked(target["expr"])
    for annotation in shown["annotations"]["list"]:
        yield annotation["name"], asked(annotation["expr"])
    for variable in shown["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert found, variable
            series, label = found.groups()
            yield variable["name"], asked(f'{series} unless {series.partition("{")[0]}{{{label}=""}}')


def asked(expression: str) -> str:
    """As Grafana would send it."""
    given = {"$namespace": "serving", "$release": "segue", "$__rate_interval": f"{WINDOW_SECONDS}s"}
    return re.sub(r"\$\w+", lambda found: given[found[0]], expression)


def until_streaming(watched: Watched, rows: int) -> RunningPod:
    """The decode worker with most streams, once it has so many."""
    used: dict[str, float] = {}

    def look() -> bool:
        used.update(
            {pod.name: watched.samples(pod)["segue_slots_used"] for pod in watched.pods.of_role("decode")}
        )
        return max(used.values()) >= rows

    until(look, 60, f"{rows} streams at one worker")
    return max(watched.pods.of_role("decode"), key=lambda pod: used[pod.name])


@contextmanager
def knocking(watched: Watched, worker: RunningPod) -> Iterator[None]:
    """Somebody with a key of his own, who knows that of the workers in public, dials a worker."""
    file = watched.pods.folder / "keys" / "worker.pem"
    known, own = parse_keys(file.read_bytes(), "worker"), new_keys()["router"].own
    with ExitStack() as stack:
        stranger(stack, f"tcp://127.0.0.1:{worker.port}", own.secret, known.own.public)
        yield


def refused(watched: Watched, worker: RunningPod) -> bool:
    refusals = {
        name: value
        for name, value in watched.samples(worker).items()
        if name.startswith("segue_link_refusals")
    }
    return any(value for name, value in refusals.items() if "foreign_key" in name)

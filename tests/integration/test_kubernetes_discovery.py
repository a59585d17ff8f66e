"""Discovery against an API server over TCP, with every fault that such a server can have."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pytest
from kubernetes.config import incluster_config
from structlog.testing import capture_logs

from router.discovery import pod_api
from router.discovery.known_pods import Listed
from router.discovery.kubernetes import KubernetesDiscovery
from router.discovery.polling import Pace
from shared.errors import StartError
from shared.process.health import Health
from shared.process.metrics import Metrics
from tests.integration.pod_server import Manifest, PodServer, Trouble, pod_manifest
from tests.integration.service_account import TOKEN, write_service_account
from tests.link_settings import write_note
from tests.metric_pages import samples_of
from tests.waiting import comes_true, soon, until

NAMESPACE = "prod"
SELECTOR = "app.kubernetes.io/name=segue,app.kubernetes.io/instance=demo"
T = TypeVar("T")


class RecordedDials:
    """Links that are only recorded."""

    def __init__(self) -> None:
        self.dialed: set[str] = set()
        self.redialed: list[str] = []
        self.hung_up: list[str] = []

    def connect(self, address: str) -> None:
        assert address not in self.dialed
        self.dialed.add(address)

    def redial(self, address: str) -> None:
        assert address in self.dialed
        self.redialed.append(address)

    def disconnect(self, address: str) -> None:
        self.dialed.remove(address)
        self.hung_up.append(address)


class RunningDiscovery:
    """Discovery on an event loop of its own."""

    def __init__(
        self,
        relist_seconds: float = 30.0,
        watch_read_seconds: float = 10.0,
        namespace: str = NAMESPACE,
        kind: type[pod_api.PodApi] = pod_api.PodApi,
    ):
        self._kind = kind
        self._namespace = namespace
        self._pace = Pace(relist_seconds, watch_read_seconds)
        self.links = RecordedDials()
        self.health = Health(loop_seconds_max=60.0)
        self._metrics = Metrics("router")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> RunningDiscovery:
        self._thread.start()
        self.discovery = self.call(self._make)
        self.call(self.discovery.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.call(self.discovery.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _make(self) -> KubernetesDiscovery:
        api = self._kind(pod_api.connect(), self._namespace or pod_api.own_namespace(), SELECTOR)
        return KubernetesDiscovery(api, self._pace, self.links, self.health, write_note)

    def call(self, work: Callable[[], T]) -> T:
        async def working() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(working(), self._loop).result(10)

    def metric(self, name: str, series: str = "source=kubernetes") -> float:
        self.call(lambda: self.discovery.publish(self._metrics))
        return samples_of(self._metrics.render().decode())[f"{name}{{{series}}}"]

    def until_dialed(self, *addresses: str, seconds_max: float = 5.0) -> None:
        until(lambda: self.links.dialed == set(addresses), seconds_max, f"dialing {addresses[:3]}")

    def until_ready(self) -> None:
        until(lambda: self.health.ready, 5, "readiness")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PodServer]:
    server = PodServer()
    monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
    yield server
    server.close()


def url(number: int) -> str:
    return f"tcp://10.0.{number // 250}.{number % 250}:8002"


def decode(number: int, *, ready: bool = True, terminating: bool = False) -> Manifest:
    ip = f"10.0.{number // 250}.{number % 250}"
    return pod_manifest(f"u{number}", "decode", ip, ready=ready, terminating=terminating)


def verbs(server: PodServer) -> list[str]:
    return [asked.verb for asked in server.asked]


def until_asked(server: PodServer, verb: str, times: int) -> None:
    until(lambda: verbs(server).count(verb) >= times, 10, f"{verb} number {times}")


def events(lines: Sequence[MutableMapping[str, Any]]) -> list[str]:
    """The lines about the API server, not those about single pods."""
    about_server = ("discovery.synced", "discovery.unreachable", "discovery.denied", "discovery.back")
    return [line["event"] for line in lines if line["event"] in about_server]


def test_a_namespace_without_pods_makes_a_router_ready(server: PodServer) -> None:
    with RunningDiscovery() as discovery:
        discovery.until_ready()
        assert discovery.links.dialed == set()
        assert discovery.metric("segue_discovery_reachable") == 1
        assert server.asked[0].namespace == NAMESPACE


def test_pods_come_become_ready_terminate_and_go(server: PodServer) -> None:
    server.put(decode(1), decode(2, ready=False), pod_manifest("router", "router", "10.0.0.9"))
    with RunningDiscovery() as discovery:
        discovery.until_dialed(url(1))
        server.put(decode(2))
        discovery.until_dialed(url(1), url(2), seconds_max=soon(1))
        server.put(decode(2, ready=False))
        server.put(decode(2))
        until(lambda: discovery.links.redialed == [url(2)], 5, "dialing one that is Ready again")
        server.put(decode(1, terminating=True), decode(3, terminating=True))
        until(lambda: discovery.metric("segue_discovery_pods", "state=terminating") == 2, 5, "terminating")
        assert discovery.links.dialed == {url(1), url(2)}
        server.remove("u1", "u3")
        discovery.until_dialed(url(2))
        assert discovery.metric("segue_discovery_pods", "state=dialed") == 1
    assert verbs(server) == ["list", "watch"]


def test_two_releases_in_one_namespace_do_not_see_each_other(server: PodServer) -> None:
    other = pod_manifest("u9", "decode", "10.0.0.9", release="other")
    server.put(decode(1), other)
    with RunningDiscovery() as discovery:
        discovery.until_dialed(url(1))
        server.put(other, pod_manifest("u8", "decode", "10.0.0.8", release="other"), decode(2))
        discovery.until_dialed(url(1), url(2))
        server.put(pod_manifest("u2", "decode", "10.0.0.2", release="other"))  # relabelled
        discovery.until_dialed(url(1))


def test_the_routers_of_the_release_are_known_by_name(server: PodServer) -> None:
    server.put(pod_manifest("a", "router", "10.0.0.1"), pod_manifest("b", "router", "fd00::2"), decode(3))
    with RunningDiscovery() as running:
        running.until_dialed(url(3))
        routers = running.call(running.discovery.routers)
    assert routers == {"demo-router-a": "http://10.0.0.1:8001", "demo-router-b": "http://[fd00::2]:8001"}


def test_hundreds_of_pods_are_followed(server: PodServer) -> None:
    server.put(*(decode(number) for number in range(500)))
    with RunningDiscovery() as discovery:
        discovery.until_dialed(*(url(number) for number in range(500)), seconds_max=10)
        server.remove(*(f"u{number}" for number in range(200)))
        server.put(*(decode(number) for number in range(500, 700)))
        discovery.until_dialed(*(url(number) for number in range(200, 700)), seconds_max=10)
    assert verbs(server) == ["list", "watch"]


def test_there_is_a_full_list_now_and_then_and_every_watch_has_its_limit(server: PodServer) -> None:
    with RunningDiscovery(relist_seconds=2.5, watch_read_seconds=1.0) as discovery:
        discovery.until_ready()
        until_asked(server, "list", 3)
    assert re.match("list( watch){2,3} list", " ".join(verbs(server)))
    watches = [asked for asked in server.asked if asked.verb == "watch"]
    assert {asked.parameters["timeoutSeconds"] for asked in watches} == {"1"}


def test_a_watch_goes_on_where_the_one_before_ended(server: PodServer) -> None:
    with RunningDiscovery(watch_read_seconds=1.0) as discovery:
        discovery.until_ready()
        for number in range(1, 25):
            server.put(decode(number))
            discovery.until_dialed(*(url(each) for each in range(1, number + 1)))
            until_asked(server, "watch", number // 10 + 1)
    assert verbs(server).count("list") == 1


@pytest.mark.parametrize("as_status", [False, True], ids=["as an event", "as a status"])
def test_an_expired_version_leads_to_a_new_list(server: PodServer, as_status: bool) -> None:
    server.put(decode(1))
    with capture_logs() as lines, RunningDiscovery(watch_read_seconds=1.0) as discovery:
        discovery.until_dialed(url(1))
        server.trouble.gone_as_status = as_status
        server.forget()
        until_asked(server, "list", 2)
        server.put(decode(2))
        discovery.until_dialed(url(1), url(2))
    assert discovery.links.hung_up == []
    assert events(lines) == ["discovery.synced"]


def test_a_cut_connection_loses_no_link_and_no_pod(server: PodServer) -> None:
    server.put(decode(1))
    with capture_logs() as lines, RunningDiscovery() as discovery:
        for number in range(2, 6):
            until_asked(server, "watch", number - 1)
            server.cut()
            server.put(decode(number))
            discovery.until_dialed(*(url(each) for each in range(1, number + 1)))
        assert discovery.links.hung_up == []
    assert events(lines) == ["discovery.synced"]


@pytest.mark.parametrize(
    "trouble", [Trouble(silent=True), Trouble(trickling=True)], ids=["silent", "trickling"]
)
def test_a_watch_that_does_not_end_is_given_up(server: PodServer, trouble: Trouble) -> None:
    server.trouble = trouble
    with RunningDiscovery(watch_read_seconds=1.0) as discovery:
        discovery.until_ready()
        server.put(decode(1))
        discovery.until_dialed(url(1), seconds_max=1.0 + pod_api.GRACE_SECONDS + soon(2))
        until_asked(server, "list", 2)


def test_an_api_server_that_is_away_costs_no_link_and_is_logged_once(server: PodServer) -> None:
    server.put(decode(1), decode(2))
    with capture_logs() as lines, RunningDiscovery() as discovery:
        discovery.until_dialed(url(1), url(2))
        server.away()
        until(lambda: discovery.metric("segue_discovery_reachable") == 0, 5, "noticing it")
        age_seconds = discovery.metric("segue_discovery_age_seconds")
        assert comes_true(lambda: discovery.metric("segue_discovery_age_seconds") > age_seconds + 1.5)
        assert discovery.links.dialed == {url(1), url(2)}
        assert discovery.health.ready
        server.remove("u1")
        server.put(decode(3))
        server.back()
        discovery.until_dialed(url(2), url(3), seconds_max=10)
        until(lambda: discovery.metric("segue_discovery_reachable") == 1, 5, "noticing its return")
        assert discovery.metric("segue_discovery_age_seconds") < soon(1)
    assert events(lines) == ["discovery.synced", "discovery.unreachable", "discovery.back"]
    unreachable = next(line for line in lines if line["event"] == "discovery.unreachable")
    assert "last known fleet" in unreachable["doing"]


@pytest.mark.parametrize(
    "trouble",
    [Trouble(broken=True), Trouble(mute=True), Trouble(nonsense=True)],
    ids=["broken", "mute", "nonsense"],
)
def test_a_router_that_starts_while_the_api_server_is_in_trouble_waits_for_it(
    server: PodServer, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_api, "LIST_SECONDS_MAX", 0.5)
    server.trouble = trouble
    server.put(decode(1))
    with RunningDiscovery() as discovery:
        assert comes_true(lambda: "the API server" in discovery.health.doing)
        assert not discovery.health.ready
        server.trouble = Trouble()
        discovery.until_ready()
        discovery.until_dialed(url(1))


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_without_permission_a_router_is_not_ready_and_names_what_is_missing(
    server: PodServer, verb: str
) -> None:
    server.trouble.denied = {verb}
    with capture_logs() as lines, RunningDiscovery() as discovery:
        until_asked(server, verb, 3)
        assert not discovery.health.ready
        assert discovery.health.doing == f"waiting for permission to {verb} pods in the namespace {NAMESPACE}"
        server.trouble.denied = set()
        discovery.until_ready()
    assert events(lines) == ["discovery.denied", "discovery.synced"]
    denied = next(line for line in lines if line["event"] == "discovery.denied")
    assert (denied["verb"], denied["resource"], denied["namespace"]) == (verb, "pods", NAMESPACE)
    assert f"cannot {verb}" in denied["detail"]


def test_a_server_that_ends_every_watch_at_once_is_asked_with_pauses(server: PodServer) -> None:
    server.trouble.hasty = True
    with RunningDiscovery() as discovery:
        discovery.until_ready()
        assert not comes_true(lambda: len(server.asked) > 20, 2.0)
        server.put(decode(1))
        discovery.until_dialed(url(1), seconds_max=6.0)


def test_a_fault_of_our_own_is_logged_and_polling_goes_on(server: PodServer) -> None:
    class FaultyApi(pod_api.PodApi):
        faults = 1

        def list_pods(self) -> Listed:
            if self.faults:
                self.faults -= 1
                raise KeyError("a fault")
            return super().list_pods()

    server.put(decode(1))
    with capture_logs() as lines, RunningDiscovery(kind=FaultyApi) as discovery:
        discovery.until_dialed(url(1))
    assert [line["event"] for line in lines].count("discovery.failed") == 1
    assert events(lines) == ["discovery.unreachable", "discovery.synced"]


def test_closing_does_not_wait_for_a_watch(server: PodServer) -> None:
    with RunningDiscovery() as discovery:
        until(lambda: verbs(server) == ["list", "watch"], 5, "the watch")
        discovery.until_ready()
        began = time.monotonic()
    assert time.monotonic() - began < soon(0.5)
    assert "discovery" not in {thread.name for thread in threading.enumerate()}


def test_in_a_pod_its_service_account_names_server_namespace_and_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = PodServer(write_service_account(tmp_path, "of-the-pod"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(pod_api, "ACCOUNT", tmp_path)
    server.put(decode(1))
    with RunningDiscovery(namespace="") as discovery:
        discovery.until_dialed(url(1))
        server.put(decode(2))
        discovery.until_dialed(url(1), url(2), seconds_max=soon(1))
        began = time.monotonic()
    assert time.monotonic() - began < soon(0.5)  # closing ends a read of TLS as well
    server.close()
    assert {asked.namespace for asked in server.asked} == {"of-the-pod"}
    assert {asked.authorization.lower() for asked in server.asked} == {f"bearer {TOKEN}"}


def test_outside_a_pod_a_router_asks_for_credentials_and_a_namespace(
    server: PodServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartError, match="--namespace"):
        pod_api.own_namespace()
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(StartError, match="service account"):
        pod_api.connect()
    assert server.asked == []

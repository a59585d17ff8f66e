"""Discovery against an API server over TCP, with every fault that such a server can have."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from router.config import RouterConfig
from router.core.dispatch import RouterCore
from router.discovery import slice_api
from router.discovery.known_pods import Listed
from router.listener.connections import ClientConnections
from router.metrics_publisher import MetricsPublisher
from router.openai.answers.resumable_streams import Resuming
from router.openai.prompts.prompts import Prompts
from router.openai.request_log import HttpCounters
from shared.links.sockets import RouterLinks
from shared.process.metrics import Metrics
from shared.wire.messages import Hello
from tests.integration.routers.running_discovery import NAMESPACE, RunningDiscovery
from tests.integration.routers.slice_server import ServedPod, SliceServer, Trouble
from tests.link_keys import new_keys
from tests.link_settings import link_settings, write_note
from tests.waiting import comes_true, soon, until


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SliceServer]:
    server = SliceServer()
    monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
    yield server
    server.close()


def url(number: int) -> str:
    return f"tcp://10.0.{number // 250}.{number % 250}:8002"


def decode(number: int, *, ready: bool = True, terminating: bool = False) -> ServedPod:
    ip = f"10.0.{number // 250}.{number % 250}"
    return ServedPod(f"u{number}", "decode", ip, ready=ready, terminating=terminating)


def verbs(server: SliceServer) -> list[str]:
    return [asked.verb for asked in server.asked]


def until_asked(server: SliceServer, verb: str, times: int) -> None:
    until(lambda: verbs(server).count(verb) >= times, 10, f"{verb} number {times}")


def events(lines: Sequence[MutableMapping[str, Any]]) -> list[str]:
    """The lines about the API server, not those about single pods."""
    about_server = ("discovery.synced", "discovery.unreachable", "discovery.denied", "discovery.back")
    return [line["event"] for line in lines if line["event"] in about_server]


def test_a_namespace_without_pods_makes_a_router_ready(server: SliceServer) -> None:
    with RunningDiscovery() as discovery:
        discovery.until_ready()
        assert discovery.links.dialed == set()
        assert discovery.metric("segue_discovery_reachable") == 1
        assert server.asked[0].namespace == NAMESPACE


def test_pods_come_become_ready_terminate_and_go(server: SliceServer) -> None:
    server.put(decode(1), decode(2, ready=False), ServedPod("router", "router", "10.0.0.9"))
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


def test_two_releases_in_one_namespace_do_not_see_each_other(server: SliceServer) -> None:
    other = ServedPod("u9", "decode", "10.0.0.9", release="other")
    server.put(decode(1), other)
    with RunningDiscovery() as discovery:
        discovery.until_dialed(url(1))
        server.put(other, ServedPod("u8", "decode", "10.0.0.8", release="other"), decode(2))
        discovery.until_dialed(url(1), url(2))
        server.put(ServedPod("u2", "decode", "10.0.0.2", release="other"))  # relabelled
        discovery.until_dialed(url(1))


def test_the_routers_of_the_release_are_known_by_name(server: SliceServer) -> None:
    server.put(
        ServedPod("a", "router", "10.0.0.1", 8001), ServedPod("b", "router", "fd00::2", 8001), decode(3)
    )
    with RunningDiscovery() as running:
        running.until_dialed(url(3))
        routers = running.call(running.discovery.routers)
    assert routers == {"demo-router-a": "http://10.0.0.1:8001", "demo-router-b": "http://[fd00::2]:8001"}


def test_slices_that_are_deleted_and_written_anew_cost_no_link(server: SliceServer) -> None:
    server.put(decode(1), decode(2))
    with RunningDiscovery() as discovery:
        discovery.until_dialed(url(1), url(2))
        server.remove_slices()
        until(lambda: discovery.metric("segue_discovery_pods", "state=absent") == 2, 5, "noticing it")
        server.put(decode(1), decode(2))
        until(lambda: discovery.metric("segue_discovery_pods", "state=absent") == 0, 5, "the new slices")
        assert discovery.links.hung_up == []
        assert discovery.links.dialed == {url(1), url(2)}


def test_a_pod_with_an_ipv6_address_alone_is_dialed_in_brackets(server: SliceServer) -> None:
    server.put(ServedPod("u1", "decode", "fd00::1"))
    with RunningDiscovery() as discovery:
        discovery.until_dialed("tcp://[fd00::1]:8002")


def sparse_slice(name: str, endpoints: object, **fields: object) -> dict[str, object]:
    """A slice of decode pods with what is required, and these fields."""
    manifest = ServedPod("", "decode", "10.0.0.1").slice(name)
    return manifest | {"endpoints": endpoints} | fields


def test_what_a_slice_leaves_out_means_what_kubernetes_says(server: SliceServer) -> None:
    """An unknown readiness is taken as ready; `serving` alone tells the readiness of a pod that terminates."""

    def endpoint(number: int, **conditions: bool) -> dict[str, object]:
        target = {"kind": "Pod", "name": f"decode-{number}", "uid": f"u{number}"}
        return {"addresses": [f"10.0.0.{number}"], "conditions": conditions, "targetRef": target}

    server.put_slice(
        sparse_slice(
            "a",
            [
                endpoint(1),
                endpoint(2, ready=False),
                endpoint(3, ready=True),
                endpoint(4, ready=False, serving=True, terminating=True),
                {"addresses": ["10.0.0.5"]},
                {"addresses": ["10.0.0.6"], "targetRef": {"kind": "Node", "name": "n", "uid": "u6"}},
            ],
        )
    )
    server.put_slice(sparse_slice("b", None))
    server.put_slice(sparse_slice("c", [endpoint(7)], ports=None))
    server.put_slice(sparse_slice("d", [endpoint(8)], addressType="FQDN"))
    with capture_logs() as lines, RunningDiscovery() as discovery:
        discovery.until_dialed(url(1), url(3))
        states = {
            state: discovery.metric("segue_discovery_pods", f"state={state}")
            for state in ("waiting", "dialed", "terminating")
        }
    assert states == {"waiting": 2, "dialed": 2, "terminating": 1}
    assert [line["pod"] for line in lines if line["event"] == "discovery.unusable"] == ["decode-7"]


def test_hundreds_of_pods_are_followed(server: SliceServer) -> None:
    server.put(*(decode(number) for number in range(500)))
    with RunningDiscovery() as discovery:
        discovery.until_dialed(*(url(number) for number in range(500)), seconds_max=soon(10))
        server.remove(*(f"u{number}" for number in range(200)))
        server.put(*(decode(number) for number in range(500, 700)))
        discovery.until_dialed(*(url(number) for number in range(200, 700)), seconds_max=soon(10))
    assert verbs(server) == ["list", "watch"]


def test_there_is_a_full_list_now_and_then_and_every_watch_has_its_limit(server: SliceServer) -> None:
    with RunningDiscovery(relist_seconds=2.5, watch_read_seconds=1.0) as discovery:
        discovery.until_ready()
        until_asked(server, "list", 3)
    assert re.match("list( watch){2,3} list", " ".join(verbs(server)))
    watches = [asked for asked in server.asked if asked.verb == "watch"]
    assert {asked.parameters["timeoutSeconds"] for asked in watches} == {"1"}


def test_a_watch_goes_on_where_the_one_before_ended(server: SliceServer) -> None:
    with RunningDiscovery(watch_read_seconds=1.0) as discovery:
        discovery.until_ready()
        for number in range(1, 25):
            server.put(decode(number))
            discovery.until_dialed(*(url(each) for each in range(1, number + 1)))
            until_asked(server, "watch", number // 10 + 1)
    assert verbs(server).count("list") == 1


@pytest.mark.parametrize("as_status", [False, True], ids=["as an event", "as a status"])
def test_an_expired_version_leads_to_a_new_list(server: SliceServer, as_status: bool) -> None:
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


def test_a_cut_connection_loses_no_link_and_no_pod(server: SliceServer) -> None:
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
def test_a_watch_that_does_not_end_is_given_up(server: SliceServer, trouble: Trouble) -> None:
    server.trouble = trouble
    with RunningDiscovery(watch_read_seconds=1.0) as discovery:
        discovery.until_ready()
        server.put(decode(1))
        discovery.until_dialed(url(1), seconds_max=1.0 + slice_api.GRACE_SECONDS + soon(2))
        until_asked(server, "list", 2)


def test_an_api_server_that_is_away_costs_no_link_and_is_logged_once(server: SliceServer) -> None:
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
        until(lambda: discovery.metric("segue_discovery_reachable") == 1, 10, "noticing its return")
        assert discovery.metric("segue_discovery_age_seconds") < soon(1)
        discovery.until_dialed(url(2), url(3), seconds_max=10)
    assert events(lines) == ["discovery.synced", "discovery.unreachable", "discovery.back"]
    unreachable = next(line for line in lines if line["event"] == "discovery.unreachable")
    assert "last known fleet" in unreachable["doing"]


@pytest.mark.parametrize(
    "trouble",
    [Trouble(broken=True), Trouble(mute=True), Trouble(nonsense=True)],
    ids=["broken", "mute", "nonsense"],
)
def test_a_router_that_starts_while_the_api_server_is_in_trouble_waits_for_it(
    server: SliceServer, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_api, "LIST_SECONDS_MAX", 0.5)
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
    server: SliceServer, verb: str
) -> None:
    server.trouble.denied = {verb}
    with capture_logs() as lines, RunningDiscovery() as discovery:
        until_asked(server, verb, 3)
        assert not discovery.health.ready
        assert (
            discovery.health.doing
            == f"waiting for permission to {verb} endpointslices in the namespace {NAMESPACE}"
        )
        server.trouble.denied = set()
        discovery.until_ready()
    assert events(lines) == ["discovery.denied", "discovery.synced"]
    denied = next(line for line in lines if line["event"] == "discovery.denied")
    assert (denied["verb"], denied["resource"], denied["namespace"]) == (verb, "endpointslices", NAMESPACE)
    assert f"cannot {verb}" in denied["detail"]


def test_a_server_that_ends_every_watch_at_once_is_asked_with_pauses(server: SliceServer) -> None:
    server.trouble.hasty = True
    with RunningDiscovery() as discovery:
        discovery.until_ready()
        assert not comes_true(lambda: len(server.asked) > 20, 2.0)
        server.put(decode(1))
        discovery.until_dialed(url(1), seconds_max=6.0)


def test_a_fault_of_our_own_is_logged_and_polling_goes_on(server: SliceServer) -> None:
    class FaultyApi(slice_api.SliceApi):
        faults = 1

        def list_slices(self) -> Listed:
            if self.faults:
                self.faults -= 1
                raise KeyError("a fault")
            return super().list_slices()

    server.put(decode(1))
    with capture_logs() as lines, RunningDiscovery(kind=FaultyApi) as discovery:
        discovery.until_dialed(url(1))
    assert [line["event"] for line in lines].count("discovery.failed") == 1
    assert events(lines) == ["discovery.unreachable", "discovery.synced"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_router_whose_discovery_has_ended_is_not_ready(server: SliceServer) -> None:
    class EndingApi(slice_api.SliceApi):
        ends = False

        def list_slices(self) -> Listed:
            if self.ends:
                raise SystemExit
            EndingApi.ends = True
            return super().list_slices()

    server.put(decode(1))
    with RunningDiscovery(relist_seconds=0.1, kind=EndingApi) as running, ExitStack() as stack:
        running.until_ready()
        settings, discovery = RouterConfig(), running.discovery
        hello = Hello(session=0, role="router", uid="r", epoch=1)
        links = RouterLinks(new_keys()["router"], hello, link_settings(), write_note=write_note)
        stack.callback(links.close)
        serving = SimpleNamespace(
            prompts=Prompts(None, settings),  # type: ignore[arg-type]
            resuming=Resuming(b"secret"),
            http_counters=HttpCounters(),
        )
        figures = MetricsPublisher(
            Metrics("router"),
            RouterCore(settings, 0.0),
            links,
            discovery,
            running.health,
            ClientConnections(settings),
            serving,  # type: ignore[arg-type]
        )
        until(lambda: discovery.fault() == "discovery has ended", 10, "the end of discovery")
        assert running.health.ready
        running.call(figures.publish)
        assert (running.health.ready, running.health.doing) == (False, "discovery has ended")


def test_closing_does_not_wait_for_a_watch(server: SliceServer) -> None:
    with RunningDiscovery() as discovery:
        until(lambda: verbs(server) == ["list", "watch"], 5, "the watch")
        discovery.until_ready()
        began = time.monotonic()
    assert time.monotonic() - began < soon(0.5)
    assert "discovery" not in {thread.name for thread in threading.enumerate()}

"""The credentials with which a router asks the API server: where they come from, and that they may be rotated."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes.config import incluster_config

from router.discovery import slice_api
from shared.primitives.errors import StartError
from tests.integration.routers.running_discovery import RunningDiscovery
from tests.integration.routers.service_account import TOKEN, write_service_account
from tests.integration.routers.slice_server import ServedPod, SliceServer
from tests.waiting import soon, until

POD = ServedPod("u1", "decode", "10.0.0.1")
LATER = ServedPod("u2", "decode", "10.0.0.2")
URL, LATER_URL = "tcp://10.0.0.1:8002", "tcp://10.0.0.2:8002"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SliceServer]:
    """An API server over TLS; this process finds its address and a service account as in a pod."""
    server = SliceServer(write_service_account(tmp_path, "of-the-pod"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(slice_api, "ACCOUNT", tmp_path)
    server.put(POD)
    yield server
    server.close()


def test_in_a_pod_its_service_account_names_server_namespace_and_credentials(server: SliceServer) -> None:
    with RunningDiscovery(namespace="") as discovery:
        discovery.until_dialed(URL)
        server.put(LATER)
        discovery.until_dialed(URL, LATER_URL, seconds_max=soon(1))
        began = time.monotonic()
    assert time.monotonic() - began < soon(0.5)  # closing ends a read of TLS as well
    assert {asked.namespace for asked in server.asked} == {"of-the-pod"}
    assert {asked.authorization.lower() for asked in server.asked} == {f"bearer {TOKEN}"}


@pytest.mark.usefixtures("server")
def test_in_a_pod_no_proxy_of_the_environment_stands_before_the_api_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_PROXY", "no_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nobody listens
    with RunningDiscovery(namespace="") as discovery:
        discovery.until_dialed(URL)


def test_a_rotated_ca_bundle_and_token_are_read_without_a_restart(
    server: SliceServer, tmp_path: Path
) -> None:
    with RunningDiscovery(namespace="") as discovery:
        discovery.until_dialed(URL)
        server.away()
        server.tls = write_service_account(tmp_path, "of-the-pod")
        (tmp_path / "token").write_text("a-new-token")
        server.token = "a-new-token"
        server.back()
        server.put(LATER)
        discovery.until_dialed(URL, LATER_URL, seconds_max=10)


def test_an_account_whose_files_are_missing_for_a_moment_is_waited_for(
    server: SliceServer, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    with RunningDiscovery(namespace="") as discovery:
        discovery.until_dialed(URL)
        server.away()
        token.unlink()
        until(lambda: discovery.metric("segue_discovery_reachable") == 0, 5, "noticing it")
        server.put(LATER)
        server.back()
        token.write_text(TOKEN)
        discovery.until_dialed(URL, LATER_URL, seconds_max=10)


def test_outside_a_pod_a_router_asks_for_credentials_and_a_namespace(
    server: SliceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_api, "ACCOUNT", Path("/nowhere"))
    with pytest.raises(StartError, match="--namespace"):
        slice_api.own_namespace()
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(StartError, match="service account"):
        slice_api.connect()
    assert server.asked == []

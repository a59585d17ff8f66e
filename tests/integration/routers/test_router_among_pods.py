"""A router process that finds its workers among pods: real links to workers, an API server in the test."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from tests.integration.routers.linked_worker import LinkedWorker
from tests.integration.routers.slice_server import ServedPod, SliceServer
from tests.link_keys import write_new_keys
from tests.unit.router.tiny_model import write_folder
from tests.waiting import comes_true, until

BODY = {"model": "tiny", "prompt": "fox", "max_tokens": 1}
NEW_POD_SECONDS_MAX = 2.0


@dataclass
class RouterAmongPods:
    """The process, where it listens, and the cluster it is in."""

    process: subprocess.Popen[str]
    url: str
    admin_url: str
    server: SliceServer
    keys: Path

    def until_ready(self, status: int = 200) -> httpx2.Response:
        until(lambda: self.readiness() == status, 30, f"/readyz {status}")
        return httpx2.get(f"{self.admin_url}/readyz", verify=False)

    def until_it_says(self, words: str) -> None:
        until(lambda: words in self.until_ready(503).text, 30, words)

    def readiness(self) -> int:
        assert self.process.poll() is None, self.process.communicate()[1]
        with contextlib.suppress(httpx2.TransportError):
            return httpx2.get(f"{self.admin_url}/readyz", verify=False).status_code
        return 0

    def complete(self) -> httpx2.Response:
        return httpx2.post(f"{self.url}/v1/completions", json=BODY, timeout=60, verify=False)

    def metric(self, line: str) -> float:
        text = httpx2.get(f"{self.admin_url}/metrics", verify=False).text
        return float(next(each for each in text.splitlines() if each.startswith(line)).rpartition(" ")[2])


@pytest.fixture
def router(tmp_path: Path) -> Iterator[RouterAmongPods]:
    """It dials pods of the release demo in the namespace prod; it may not list them yet."""
    write_new_keys(tmp_path / "keys")
    server = SliceServer()
    server.trouble.denied = {"list"}
    with socket.socket() as holder, socket.socket() as admin_holder:
        for each in (holder, admin_holder):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        port, admin_port = holder.getsockname()[1], admin_holder.getsockname()[1]
        flags = {
            "model": write_folder(tmp_path / "tiny"),
            "port": port,
            "admin-port": admin_port,
            "link-keys-file": tmp_path / "keys" / "router.pem",
            "discovery": "kubernetes",
            "namespace": "prod",
            "slice-selector": "app.kubernetes.io/name=segue,app.kubernetes.io/instance=demo",
            "waiting-seconds-max": 5,
        }
        command = [sys.executable, "-m", "router", *(f"--{name}={value}" for name, value in flags.items())]
        environment = os.environ | {"KUBECONFIG": str(server.write_kubeconfig(tmp_path / "kubeconfig"))}
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        try:
            urls = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"
            yield RouterAmongPods(process, *urls, server, tmp_path / "keys")
        finally:
            process.kill()
            process.communicate()
            server.close()


@pytest.fixture
def workers(router: RouterAmongPods) -> Iterator[tuple[LinkedWorker, LinkedWorker]]:
    """One of each role; no pod tells of them yet."""
    prefill, decode = (
        LinkedWorker(role, f"u-{role}", router.keys / "worker.pem") for role in ("prefill", "decode")
    )
    yield prefill, decode
    prefill.close()
    decode.close()


def test_a_router_is_ready_with_permission_holds_requests_and_serves_them_when_pods_come(
    router: RouterAmongPods, workers: tuple[LinkedWorker, LinkedWorker]
) -> None:
    prefill, decode = workers
    pods = [
        ServedPod("u-prefill", "prefill", "127.0.0.1", prefill.port),
        ServedPod("u-decode", "decode", "127.0.0.1", decode.port),
    ]
    router.until_it_says("permission to list endpointslices in the namespace prod")
    router.server.trouble.denied = set()
    router.until_ready()

    with ThreadPoolExecutor(4) as threads:
        held = [threads.submit(router.complete) for _ in range(4)]
        until(
            lambda: router.metric('segue_requests_running{role="router",state="waiting"}') == 4, 5, "holding"
        )
        began = time.monotonic()
        router.server.put(*pods)
        assert [each.result().status_code for each in held] == [200] * 4
        assert time.monotonic() - began < NEW_POD_SECONDS_MAX
    assert len(prefill.prefills) == 4

    router.server.remove("u-prefill")
    until(lambda: router.metric('segue_workers{role="router",worker_role="prefill"}') == 0, 5, "hanging up")
    refused = router.complete()
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert router.readiness() == 200


def test_an_api_server_that_is_away_is_not_missed_by_clients(
    router: RouterAmongPods, workers: tuple[LinkedWorker, LinkedWorker]
) -> None:
    prefill, decode = workers
    router.server.trouble.denied = set()
    router.server.put(
        ServedPod("u-prefill", "prefill", "127.0.0.1", prefill.port),
        ServedPod("u-decode", "decode", "127.0.0.1", decode.port),
    )
    router.until_ready()
    assert router.complete().status_code == 200
    router.server.away()
    until(lambda: router.metric("segue_discovery_reachable") == 0, 10, "noticing it")
    assert router.readiness() == 200
    assert router.complete().status_code == 200
    assert (prefill.routers, decode.routers) == (1, 1)

    router.process.terminate()
    _, said = router.process.communicate(timeout=10)
    assert router.process.returncode == 0
    assert said.count("serving with the last known fleet") == 1
    assert "Traceback" not in said


def test_a_dead_worker_that_still_has_a_pod_leaves_the_router_ready(router: RouterAmongPods) -> None:
    router.server.trouble.denied = set()
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        dead = nobody.getsockname()[1]
    router.server.put(ServedPod("u-dead", "decode", "127.0.0.1", dead))
    router.until_ready()
    until(lambda: router.metric('segue_discovery_pods{role="router",state="dialed"}') == 1, 5, "dialing")
    assert not comes_true(lambda: router.readiness() != 200, 1.0)


WRONG = {
    "no selector": (["--discovery", "kubernetes"], "--slice-selector is required"),
    "workers as well": (
        ["--discovery", "kubernetes", "--slice-selector", "a=b", "--workers", "prefill=127.0.0.1:1"],
        "--workers is for --discovery static",
    ),
    "no namespace": (["--discovery", "kubernetes", "--slice-selector", "a=b"], "--namespace is required"),
}


@pytest.mark.parametrize(("flags", "sentence"), WRONG.values(), ids=WRONG)
def test_a_contradictory_setting_is_one_sentence_and_status_1(
    tmp_path: Path, flags: list[str], sentence: str
) -> None:
    server = SliceServer()
    environment = os.environ | {"KUBECONFIG": str(server.write_kubeconfig(tmp_path / "kubeconfig"))}
    command = [sys.executable, "-m", "router", "--model", "m", "--link-keys-file", "s", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=30)
    server.close()
    assert ended.returncode == 1
    assert sentence in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1

"""A release of real processes that a router finds as pods: workers, a router, and an API server in the test.

The test is what the kubelet and the controllers are in a cluster: it starts processes, puts them into EndpointSlices
while they are ready, and takes out those that end.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2

from tests.integration.deployments.cut_model import cut_model
from tests.integration.routers.slice_server import ServedPod, SliceServer
from tests.link_keys import write_new_keys
from tests.waiting import until

START_SECONDS_MAX = 120
SELECTOR = "app.kubernetes.io/name=segue,app.kubernetes.io/instance=segue"
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "prefill": ("--kv-pages=400", "--threads=1"),
    "decode": ("--kv-pages=1200", "--threads=1"),
    # Pages travel: an idle decode worker would else compute most of the prompts.
    "router": ("--local-prefill=fallback", "--silence-seconds=20", "--waiting-seconds-max=240"),
}


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, and not the same."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@dataclass(frozen=True, slots=True)
class RunningPod:
    """One process, and where it answers."""

    name: str
    role: str
    process: subprocess.Popen[bytes]
    admin_port: int
    port: int  # of links; of a router: of the API

    def ready(self) -> bool:
        assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}"
        with suppress(httpx2.TransportError):
            url = f"http://127.0.0.1:{self.admin_port}/readyz"
            return httpx2.get(url, timeout=5.0, verify=False).status_code == 200
        return False


class Pods:
    """The pods of the release; names are never used again, as a Deployment's are not."""

    def __init__(self, folder: Path, api_keys: Path):
        self.folder, self.server = folder, SliceServer()
        self.running: dict[str, RunningPod] = {}
        self._api_keys = api_keys
        self._started = 0
        write_new_keys(folder / "keys")
        self._kubeconfig = self.server.write_kubeconfig(folder / "kubeconfig")

    def start(self, *roles: str) -> list[RunningPod]:
        """Start a pod of each of these roles, and wait until all are ready and known to the router."""
        pods = [self._start(role) for role in roles]
        for pod in pods:
            until(pod.ready, START_SECONDS_MAX, f"the readiness of {pod.name}")
        for pod in pods:
            if pod.role != "router":
                served = ServedPod(pod.name, pod.role, "127.0.0.1", pod.port, release="segue")
                self.server.put(served)
        return pods

    def _start(self, role: str) -> RunningPod:
        admin_port, port = free_ports(2)
        self._started += 1
        name = f"segue-{role}-{self._started}"
        own = "router" if role == "router" else "worker"
        flags = [f"--model={cut_model()}", "--served-model-name=smollm2", f"--uid={name}", *SETTINGS[role]]
        flags += ["--host=127.0.0.1", "--admin-host=127.0.0.1", f"--admin-port={admin_port}"]
        flags += [f"--link-keys-file={self.folder / 'keys' / own}.pem", "--log-level=warning"]
        if role == "router":
            flags += [f"--port={port}", "--discovery=kubernetes", "--namespace=prod"]
            flags += [f"--slice-selector={SELECTOR}", f"--api-keys-file={self._api_keys}"]
        else:
            flags += [f"--links-port={port}", "--kv-interface=lo"]
        environment = {**os.environ, "KUBECONFIG": str(self._kubeconfig)}
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen([sys.executable, "-m", role, *flags], stderr=log, env=environment)
        pod = RunningPod(name, role, process, admin_port, port)
        self.running[name] = pod
        return pod

    def of_role(self, role: str) -> list[RunningPod]:
        return [pod for pod in self.running.values() if pod.role == role]

    def delete(self, pod: RunningPod, number: signal.Signals = signal.SIGTERM) -> None:
        """End a pod by a signal; SIGTERM lets it drain. It is in no slice from now on."""
        self.server.remove(pod.name)
        pod.process.send_signal(number)
        pod.process.wait(60)
        del self.running[pod.name]

    def close(self) -> None:
        for pod in self.running.values():
            pod.process.kill()
            pod.process.wait()
        self.server.close()


@contextmanager
def release(folder: Path, api_keys: Path, *roles: str) -> Iterator[Pods]:
    """A router and these workers, gone afterwards; the clients' keys are in a file."""
    pods = Pods(folder, api_keys)
    try:
        pods.start(*roles, "router")
        yield pods
    finally:
        pods.close()

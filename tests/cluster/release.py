"""The release under test: where it listens, what its pods show, and what must be so when nothing runs."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from tests.cluster.kubernetes import Cluster, ClusterPod, image_tag
from tests.cluster.load import LOOK_SECONDS_MAX
from tests.metric_pages import held_in, samples_of
from tests.waiting import until

NAME = "segue"
CHART = "charts/segue"
DEMO_VALUES = "ci/cpu-demo.yaml"
ADMIN_PORT = 8001
COMPONENTS = ("router", "prefill", "decode")
READY_SECONDS_MAX = 240
# One router is enough for most tests; a pod may take long to start where all pods share two cores; and each of two
# decode pods shall have half of the streams, however far those before have come. The network of the cluster beside the
# checkout enforces no policies. These are values of older charts, too.
LASTING_VALUES = (
    "router.replicas=1,router.config.waitingSecondsMax=120,router.config.decodePolicy=total_requests,"
    "networkPolicy.verify=false"
)
# Prefill pods compute the prompts, so that pages travel.
VALUES = f"{LASTING_VALUES},router.config.localPrefill=fallback"


@dataclass(slots=True)
class HelmRelease:
    """An installed chart."""

    cluster: Cluster
    url: str = ""
    api_key: str = ""
    chart: str = CHART
    values: str = VALUES

    def install(self, *flags: str) -> None:
        """Install, and wait until all pods are ready."""
        self._helm("install", *flags)
        self.connect()

    def connect(self) -> None:
        """Look up where the installed release listens, and the key that it has drawn."""
        service = self.cluster.get("service", f"{NAME}-router")
        drawn = self.cluster.get("secret", f"{NAME}-api-keys")["data"]["api-key"]
        self.api_key = base64.b64decode(drawn).decode()
        self.url = f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"

    @property
    def headers(self) -> dict[str, str]:
        """What a client sends with each request."""
        return {"authorization": f"Bearer {self.api_key}"}

    def upgrade(self, *flags: str) -> None:
        """Upgrade, and wait for the rollout."""
        self._helm("upgrade", *flags)

    def scale(self, component: str, replicas: int) -> None:
        """`kubectl scale`; returns at once."""
        self.cluster.kubectl("scale", f"deployment/{NAME}-{component}", f"--replicas={replicas}")

    def restart(self, component: str) -> None:
        """`kubectl rollout restart`, waited for."""
        self.cluster.kubectl("rollout", "restart", f"deployment/{NAME}-{component}")
        self.cluster.kubectl("rollout", "status", f"deployment/{NAME}-{component}", "--timeout=5m")

    def wait_for(self, component: str, replicas: int) -> None:
        """Until a component has exactly this many pods, all ready, and every router gives work to them."""

        def there() -> bool:
            pods = self.cluster.pods(component)
            ready = len(pods) == replicas and all(pod.ready and not pod.terminating for pod in pods)
            return ready and (component == "router" or self._known(component) == {replicas})

        until(there, READY_SECONDS_MAX, f"{replicas} ready {component} pods", LOOK_SECONDS_MAX)

    def _known(self, component: str) -> set[float]:
        """How many workers of a component the ready routers know, all that is heard."""
        routers = [pod for pod in self.cluster.pods("router") if pod.ready]
        name = f"segue_workers{{worker_role={component}}}"
        return {self.metrics(pod).get(name, 0.0) for pod in routers}

    def metrics(self, pod: ClusterPod) -> dict[str, float]:
        """Everything at a pod's /metrics, as `name{label=value,…}` without the role; nothing if it has ended."""
        try:
            page = self.cluster.page(pod, ADMIN_PORT, "/metrics")
        except AssertionError:
            now = self.cluster.now(pod)
            if now is None or now.terminating:
                return {}  # its process ended since it was listed
            raise
        return samples_of(page)

    def total(self, component: str, name: str) -> float:
        """A metric summed over the pods of a component that are ready. One without labels has to be there."""
        pods = [pod for pod in self.cluster.pods(component) if pod.ready]
        pages = [page for pod in pods if (page := self.metrics(pod))]
        assert "{" in name or all(name in page for page in pages), f"{component} has no metric {name}"
        return sum(page.get(name, 0.0) for page in pages)

    def busiest(self, component: str) -> ClusterPod:
        """The pod with the most requests in slots."""
        pods = [pod for pod in self.cluster.pods(component) if pod.ready and not pod.terminating]
        return max(pods, key=lambda pod: self.metrics(pod).get("segue_slots_used", 0.0))

    def has_changed(self, pod: ClusterPod) -> bool:
        """Whether it is terminating or gone, or its container has ended or was started again."""
        now = self.cluster.now(pod)
        return now is None or now.terminating or not now.running or now.restarts > pod.restarts

    def debug(self, rid: str) -> dict[str, Any]:
        """What the routers tell of a request."""
        router = next(pod for pod in self.cluster.pods("router") if pod.ready)
        answered: dict[str, Any] = json.loads(self.cluster.page(router, ADMIN_PORT, f"/debug/requests/{rid}"))
        return answered

    def held(self) -> dict[str, float]:
        """What requests still hold anywhere; empty when all is as before the first request."""
        held = {}
        for pod in self.cluster.pods():
            if pod.component not in COMPONENTS or not pod.ready:
                continue
            try:
                found = held_in(self.metrics(pod))
            except AssertionError:  # it was killed, and the API server does not know yet
                found = {"gives no answer": 1.0}
            held.update({f"{pod.name} {name}": value for name, value in found.items()})
        return held

    def _helm(self, verb: str, *flags: str) -> None:
        waiting = ("--wait", "--timeout", "5m")
        demo = ("-f", f"{self.chart}/{DEMO_VALUES}")
        ours = ("--set", f"{self.values},image.tag={image_tag()}")
        self.cluster.helm(verb, NAME, self.chart, *demo, *waiting, *ours, *flags)

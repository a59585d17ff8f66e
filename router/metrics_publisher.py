"""What a router shows at /metrics and /readyz: gathered from its parts, and given to `shared.process.metrics`.

Measurements are taken out of the parts several times a second, so that nothing piles up, and once more at each scrape.
What costs a look at every request is asked for at scrapes alone. Nothing here decides anything.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

from router.access.keyed_clients import KeyedClients
from router.core.dispatch import RouterCore
from router.discovery.static import Discovery
from router.gateway_metrics import GatewayMetrics
from router.listener.connections import ClientConnections
from router.listener.tls import ServerCertificate
from router.openai.serving import OpenAIServing
from shared.links.sockets import RouterLinks
from shared.primitives.metric_fields import all_declared, durations
from shared.process import gauges, logs
from shared.process.health import Health
from shared.process.metrics import Metrics
from shared.wire.messages import WORKER_ROLES

PUBLISH_SECONDS = 0.2  # between two refreshes of /metrics


@all_declared
@dataclass(slots=True)
class LoopCounters:
    """How the router's event loop gets on; measurements since they were last published."""

    lag_seconds: deque[float] = durations(
        "segue_loop_lag_seconds",
        "Seconds by which a router's event loop was late for its own timer, five times a second. All clients of this "
        "router wait as long: its core is busy, or something holds up the loop.",
    )


class MetricsPublisher:
    """What /metrics and /readyz show: refreshed at each scrape, and between them so that nothing piles up."""

    def __init__(
        self,
        metrics: Metrics,
        core: RouterCore,
        links: RouterLinks,
        discovery: Discovery,
        health: Health,
        clients: ClientConnections,
        serving: OpenAIServing,
        keyed: KeyedClients | None = None,
        certificate: ServerCertificate | None = None,
    ):
        self.gateway = GatewayMetrics(core, metrics, clients.settings)
        self._serving = serving
        self._metrics = metrics
        self._core = core
        self._links = links
        self._discovery = discovery
        self._health = health
        self._clients = clients
        self._keyed = keyed
        self._certificate = certificate
        self._loop = LoopCounters()

    async def publish_for_ever(self) -> None:
        """Refresh every `PUBLISH_SECONDS`, and show /livez that the loop turns."""
        while True:
            self._health.beat()
            self.publish()
            began_at = time.monotonic()
            await asyncio.sleep(PUBLISH_SECONDS)
            self._loop.lag_seconds.append(max(0.0, time.monotonic() - began_at - PUBLISH_SECONDS))

    def publish_for_scrape(self) -> None:
        """Refresh all figures, those too for which all requests are looked at; on the event loop."""
        self.publish()
        oldest = self._core.oldest_by_state(asyncio.get_running_loop().time())
        for state, seconds in oldest.items():
            self._metrics.set(gauges.OLDEST_REQUEST_SECONDS, seconds, state=state)

    def publish(self) -> None:
        """Refresh what is cheap; on the event loop."""
        if fault := self._discovery.fault():
            self._health.become_unready(fault)
        self._metrics.publish(self._core.counters)
        self._metrics.publish(self._links.counters)
        self._metrics.publish(self._clients.counters)
        self._metrics.publish(self._serving.resuming.counters)
        self._metrics.publish(self._serving.http_counters)
        self._metrics.publish(self._loop)
        self._metrics.publish(self._serving.prompts.counters)
        for state, count in self._serving.prompts.tokenizing.items():
            self._metrics.set(gauges.TOKENIZING, count, state=state)
        if self._keyed is not None:
            self._publish_keys(self._keyed)
        if self._certificate is not None:
            self._metrics.publish(self._certificate.counters)
            self._metrics.set(gauges.CERTIFICATE_EXPIRY, self._certificate.expires_at)
        self._metrics.set(gauges.CONNECTIONS, len(self._clients))
        self._metrics.publish(logs.counters)
        self._discovery.publish(self._metrics)
        self._metrics.set(gauges.READY, self._health.ready)
        for state, count in self._core.requests_by_state.items():
            self._metrics.set(gauges.REQUESTS_RUNNING, count, state=state)
        load = self.gateway.values()
        self._metrics.set(gauges.QUEUED_REQUESTS, load[gauges.QUEUED_REQUESTS])
        self._metrics.set(gauges.RUNNING_REQUESTS, load[gauges.RUNNING_REQUESTS])
        self._metrics.set(gauges.KV_USED_RATIO, load[gauges.KV_USED_RATIO])
        workers = {role: len(self._core.fleet.of_role(role)) for role in WORKER_ROLES}
        for role, count in workers.items():
            self._metrics.set(gauges.WORKERS, count, worker_role=role)
        self._health.facts = {"workers_up": sum(workers.values()), "serving": self._core.fleet.serving}

    def _publish_keys(self, keyed: KeyedClients) -> None:
        self._metrics.publish(keyed.counters)
        self._metrics.set_all(gauges.KEY_REQUESTS_OPEN, keyed.requests_open())
        self._metrics.set_all(gauges.KEY_CONTEXT_TOKENS, keyed.context_tokens())

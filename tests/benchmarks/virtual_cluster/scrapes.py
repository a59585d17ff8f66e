"""What `/metrics` of a virtual cluster's processes would show: two scrapes of a run, for whoever judges deployments.

Counters and gauges go through the product's own `Metrics` and its text. What a real process measures around its core
has no place in a virtual one; the router's loop and its API keys are shown from what the virtual router knows of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shared.local.bottleneck import Scrape
from shared.local.live_doctor import samples_of
from shared.process import gauges
from shared.process.health import Health
from shared.process.metrics import Metrics
from shared.wire.messages import WORKER_ROLES
from shared.worker.worker import publish_scheduler
from tests.benchmarks.virtual_cluster.cluster import VirtualCluster
from tests.benchmarks.virtual_cluster.router import VirtualRouter
from tests.benchmarks.virtual_cluster.worker import VirtualWorker

LOOK_SECONDS = 0.1  # between two looks at a router's lag, as its own loop has


@dataclass(slots=True)
class ScrapedCluster:
    """Runs a cluster until the second scrape, and gives both."""

    cluster: VirtualCluster
    metrics: dict[str, Metrics] = field(default_factory=dict)
    lags: dict[str, list[float]] = field(default_factory=dict)  # seconds, by router

    def scrapes(self, first_at: float, seconds: float = 10.0) -> tuple[Scrape, Scrape]:
        """At `first_at` of the timeline, and so many seconds later."""
        cluster = self.cluster
        found: list[Scrape] = []
        for at in (first_at, first_at + seconds):
            cluster.timeline.at(at, lambda: found.append(self._scrape()))
        self._look()
        cluster.begin()
        while len(found) < 2:
            assert cluster.timeline.advance(), "nothing happens any more"
        return found[0], found[1]

    def _look(self) -> None:
        """As each process does between scrapes: publish, and measure how late the router's loop is."""
        for router in self.cluster.routers.values():
            self.lags.setdefault(router.hello.uid, []).append(router.process.now - self.cluster.timeline.now)
        for process in self._processes():
            self._publish(process)
        self.cluster.timeline.after(LOOK_SECONDS, self._look)

    def _processes(self) -> list[VirtualRouter | VirtualWorker]:
        return [*self.cluster.routers.values(), *self.cluster.workers.values()]

    def _publish(self, process: VirtualRouter | VirtualWorker) -> None:
        role, uid = process.hello.role, process.hello.uid
        metrics = self.metrics.get(uid) or self.metrics.setdefault(uid, Metrics(role))
        if isinstance(process, VirtualWorker):
            publish_scheduler(metrics, Health(60.0), process.scheduler)
            metrics.set(gauges.SLOTS, process.shape.config.max_running_requests)
            return
        metrics.publish(process.core.counters)
        for state, count in process.core.requests_by_state.items():
            metrics.set(gauges.REQUESTS_RUNNING, count, state=state)
        for worker_role in WORKER_ROLES:
            count = len(process.core.fleet.of_role(worker_role))
            metrics.set(gauges.WORKERS, count, worker_role=worker_role)

    def _scrape(self) -> Scrape:
        pages = {}
        for process in self._processes():
            self._publish(process)
            page = self.metrics[process.hello.uid].render().decode()
            if isinstance(process, VirtualRouter):
                page += self._shell_of(process)
            pages[process.hello.uid] = samples_of(page)
        return Scrape(self.cluster.timeline.now, pages)

    def _shell_of(self, router: VirtualRouter) -> str:
        """What a router shows of its loop and its keys, which its core does not know."""
        lags = self.lags[router.hello.uid]
        lines = [
            f'segue_loop_lag_seconds_sum{{role="router"}} {sum(lags)}',
            f'segue_loop_lag_seconds_count{{role="router"}} {len(lags)}',
        ]
        tenants = Counter(record.traced.tenant for record in router.open.values() if record.traced.tenant)
        lines += [
            f'segue_key_requests_open{{role="router",key="{key}"}} {count}' for key, count in tenants.items()
        ]
        ended = Counter(
            each.traced.tenant for each in self.cluster.records if each.completed and each.traced.tenant
        )
        lines += [
            f'segue_key_requests_total{{role="router",key="{key}",outcome="served"}} {count}'
            for key, count in ended.items()
        ]
        return "\n".join(lines) + "\n"

"""The interface of every discovery, and the simplest one: a list of workers that does not change.

Discovery decides which workers are dialed. Whether a dialed worker can be reached is known to its link. Discovery on
Kubernetes is in `kubernetes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from router.discovery.worker_address import WorkerAddress
from shared.process.health import Health
from shared.process.metrics import Metrics


class Dialer(Protocol):
    """The side of `shared.links.sockets.RouterLinks` that discovery needs."""

    def connect(self, address: str) -> None: ...

    def redial(self, address: str) -> None: ...

    def disconnect(self, address: str) -> None: ...


class Discovery(Protocol):
    """Dials the workers and says when the router is ready. Belongs to the event loop's thread.

    `routers`: the URL of each router's admin port in the release, by its uid, as far as is known. `routers_ready`: how
    many routers share the clients, as far as is known; this one may be missing. `fault`: why no
    worker is found any more, until the router is started anew; empty: nothing is wrong.
    """

    def start(self) -> None: ...

    def routers(self) -> Mapping[str, str]: ...

    def routers_ready(self) -> int: ...

    def fault(self) -> str: ...

    def publish(self, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class StaticDiscovery:
    """Workers that are listed in the settings: all are dialed at the start, and whenever their link is down."""

    def __init__(self, workers: Sequence[WorkerAddress], links: Dialer, health: Health):
        self._workers = workers
        self._links = links
        self._health = health

    def start(self) -> None:
        """Dial them all. The router becomes ready with the first pair that can serve: the core says when."""
        for worker in self._workers:
            self._links.connect(worker.url)
        self._health.doing = "waiting for workers"

    def routers(self) -> Mapping[str, str]:
        """None is known."""
        return {}

    def routers_ready(self) -> int:
        """Only this one is known."""
        return 1

    def fault(self) -> str:
        """A list cannot fail."""
        return ""

    def publish(self, metrics: Metrics) -> None:
        """Nothing to show: the list is a setting."""

    def close(self) -> None:
        """Nothing to end: the links are closed by their owner."""

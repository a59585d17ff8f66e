"""Discovery as it runs in a router: on an event loop of its own, with links that are only recorded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from router.discovery import slice_api
from router.discovery.kubernetes import KubernetesDiscovery
from router.discovery.polling import Pace
from shared.process.health import Health
from shared.process.metrics import Metrics
from tests.link_settings import write_note
from tests.metric_pages import samples_of
from tests.waiting import until

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
        kind: type[slice_api.SliceApi] = slice_api.SliceApi,
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
        api = self._kind(slice_api.connect, self._namespace or slice_api.own_namespace(), SELECTOR)
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

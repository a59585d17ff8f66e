"""Mistakes in what may wait, and how long: see `mutations`."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.dispatch import RouterCore
from router.core.effects import RequestAborted
from router.core.fleet.workers import Fleet, KvGroup, Worker
from router.core.queueing.backpressure import Backpressure
from router.core.requests.lifecycle import RequestEvent
from router.core.requests.live_request import LiveRequest
from router.core.requests.request_queue import RequestQueue
from router.core.requests.reservations import Reservations
from router.core.requests.tenants import Tenant
from router.core.worker_events.worker_replies import WorkerReplies
from tests.simulation.mistakes.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("waiting", "as much is computed as prefill can, whatever decode takes")
def _no_bound() -> list[Patch]:
    def full_lanes(self: Backpressure, tenant: Tenant, now: float) -> frozenset[KvGroup]:
        del self, tenant, now
        return frozenset()

    return [(Backpressure, "full_lanes", full_lanes)]


@_mistake("waiting", "at a rate of nothing, nothing is computed")
def _shut() -> list[Patch]:
    def lane_min(self: Backpressure, kv_group: KvGroup) -> int:
        del self, kv_group
        return 0

    return [(Backpressure, "_lane_min", lane_min)]


@_mistake("waiting", "a new request is expected to wait for all others, whosever turn it is")
def _last_in_line() -> list[Patch]:
    def place_of_new(self: RequestQueue, tenant: str, priority: int) -> int:
        del tenant, priority
        return len(self)

    return [(RequestQueue, "place_of_new", place_of_new)]


@_mistake("partitions", "a worker that cannot fetch the pages is a lost worker")
def _each_failed_fetch_is_a_loss() -> list[Patch]:
    def unreachable(self: WorkerReplies, live: LiveRequest, worker: Worker, now: float) -> None:
        self._lost(live, worker, "unreachable", now, worker_has_released=True)

    return [(WorkerReplies, "_unreachable", unreachable)]


@_mistake("partitions", "a worker that could not fetch the pages is asked for them again")
def _asked_again() -> list[Patch]:
    def untried(self: RouterCore, live: LiveRequest, workers: Sequence[Worker]) -> Sequence[Worker]:
        del self, live
        return workers

    return [(RouterCore, "_untried", untried)]


@_mistake("waiting", "a request that its worker has forgotten is waited for")
def _waits_on() -> list[Patch]:
    def has_stalled(self: Reservations, live: LiveRequest, now: float) -> bool:
        self.deadlines.set(("stall", live.rid), now + 10.0)
        return False

    return [(Reservations, "has_stalled", has_stalled)]


@_mistake("waiting", "after events of links nothing is placed before the next client or deadline")
def _settles_nothing() -> list[Patch]:
    def settle(self: RouterCore, now: float) -> None:
        del self, now

    return [(RouterCore, "settle", settle)]


@_mistake("waiting", "the place of a client that has gone stays empty until something else happens")
def _gone_wakes_nobody() -> list[Patch]:
    def cancel(self: RouterCore, rid: str, now: float) -> None:
        live = self._requests.live.get(rid)
        if live is not None:
            self._requests.end(live, RequestEvent.CANCELLED, RequestAborted(), now)
        self._place_pending(now)

    return [(RouterCore, "cancel", cancel)]


@_mistake("waiting", "a draining worker is counted out when it drains, and again when it goes")
def _counted_out_twice() -> list[Patch]:
    down = Fleet.down

    def twice(self: Fleet, peer: str) -> Worker | None:
        worker = down(self, peer)
        if worker is not None and worker.draining:
            self._count(worker, -1)
        return worker

    return [(Fleet, "down", twice)]

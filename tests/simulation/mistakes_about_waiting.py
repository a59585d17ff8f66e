"""Mistakes in what may wait, and how long: see `tests.simulation.mutations`."""

from __future__ import annotations

from router.core.backpressure import Backpressure
from router.core.fleet import Lane
from router.core.request_queue import RequestQueue
from router.core.tenants import Tenant
from tests.simulation.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("waiting", "as much is computed as prefill can, whatever decode takes")
def _no_bound() -> list[Patch]:
    def full_lanes(self: Backpressure, tenant: Tenant, now: float) -> frozenset[Lane]:
        del self, tenant, now
        return frozenset()

    return [(Backpressure, "full_lanes", full_lanes)]


@_mistake("waiting", "at a rate of nothing, nothing is computed")
def _shut() -> list[Patch]:
    def lane_min(self: Backpressure, lane: Lane) -> int:
        del self, lane
        return 0

    return [(Backpressure, "_lane_min", lane_min)]


@_mistake("waiting", "a new request is expected to wait for all others, whosever turn it is")
def _last_in_line() -> list[Patch]:
    def place_of_new(self: RequestQueue, tenant: str, priority: int) -> int:
        del tenant, priority
        return len(self)

    return [(RequestQueue, "place_of_new", place_of_new)]

"""Mistakes in what tenants are charged, share and keep from each other: see `tests.simulation.mutations`."""

from __future__ import annotations

from typing import Any

import decode.admission
import prefill.scheduler
from router.core.fair_clock import FairClock
from router.core.fleet import Worker
from router.core.live_request import LiveRequest
from router.core.request_queue import RequestQueue
from router.core.tenants import Tenant, Tenants
from tests.simulation.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("tenants", "tenants read each other's caches")
def _caches_shared() -> list[Patch]:
    def cache_key(self: Tenant, salt: str, *, shared: bool) -> str:
        del self, shared
        return salt

    return [(Tenant, "cache_key", cache_key)]


@_mistake("tenants", "a request that returns to its queue is charged again")
def _charged_twice() -> list[Patch]:
    def push(self: RequestQueue, live: LiveRequest, tokens: int) -> None:
        live.starts.pop(self._state, None)
        real(self, live, tokens)

    real = RequestQueue.push
    return [(RequestQueue, "push", push)]


@_mistake("tenants", "what a client that hung up did not use is not given back")
def _nothing_given_back() -> list[Patch]:
    def give_back(self: RequestQueue, live: LiveRequest, tokens: int) -> None:
        if live.visits:
            real(self, live, tokens)

    real = RequestQueue.give_back
    return [(RequestQueue, "give_back", give_back)]


@_mistake("tenants", "a tenant is not forgotten when its last request ends")
def _tenants_stay() -> list[Patch]:
    def leave(self: Tenants, tenant: Tenant, now: float) -> None:
        if tenant.live or now < 1.0:
            real(self, tenant, now)

    real = Tenants.leave
    return [(Tenants, "leave", leave)]


@_mistake("tenants", "workers keep nothing for those who hold little")
def _nobody_is_light() -> list[Patch]:
    def is_light(req: Any, others: Any) -> bool:
        del req, others
        return False

    return [(decode.admission, "is_light", is_light), (prefill.scheduler, "is_light", is_light)]


@_mistake("tenants", "a full worker is not asked for a tenant that has nothing there")
def _nobody_is_new() -> list[Patch]:
    def newcomer(self: Worker, tenant: str) -> bool:
        del self, tenant
        return False

    return [(Worker, "_newcomer", newcomer)]


@_mistake("tenants", "a newcomer goes behind all who wait")
def _first_come() -> list[Patch]:
    def start(self: FairClock, tenant: str, cost: float) -> float:
        self._now = max([self._now, *(end for _, end in self._last.values())])
        return real(self, tenant, cost)

    real = FairClock.start
    return [(FairClock, "start", start)]

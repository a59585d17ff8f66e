"""Mistakes in what tenants are charged, share and keep from each other: see `tests.simulation.mutations`."""

from __future__ import annotations

from router.core.live_request import LiveRequest
from router.core.request_queue import RequestQueue
from router.core.tenants import Tenant, Tenants
from tests.simulation.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("tenants", "tenants read each other's caches")
def _caches_shared() -> list[Patch]:
    def cache_key(self: Tenant, salt: str, shared: bool) -> str:
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
    def ended(self: RequestQueue, live: LiveRequest, unused: int) -> None:
        real(self, live, unused if live.visits else 0)

    real = RequestQueue.ended
    return [(RequestQueue, "ended", ended)]


@_mistake("tenants", "a tenant is not forgotten when its last request ends")
def _tenants_stay() -> list[Patch]:
    def leave(self: Tenants, tenant: Tenant, now: float) -> None:
        if tenant.live or now < 1.0:
            real(self, tenant, now)

    real = Tenants.leave
    return [(Tenants, "leave", leave)]

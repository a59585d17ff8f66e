"""Mistakes in what tenants are charged, share, wait for and keep from each other: see `mutations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decode import admission as decode_admission
from decode.admission import Admission
from decode.retraction import Retraction
from prefill import scheduler as prefill_scheduler
from prefill import waiting_queue
from prefill.scheduler import PrefillScheduler
from router.core.requests.live_request import LiveRequest
from router.core.requests.request_queue import RequestQueue
from router.core.requests.tenants import Tenant, Tenants
from shared.batch.req import Req
from shared.kv.radix_cache import Node, RadixCache
from shared.scheduling import tenant_shares
from tests.simulation.mistakes.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("tenants", "tenants read each other's caches")
def _caches_shared() -> list[Patch]:
    def cache_key(self: Tenant, salt: str, shared: bool) -> str:
        del self, shared
        return salt

    return [(Tenant, "cache_key", cache_key)]


@_mistake("tenants", "pages of another key are found")
def _keys_ignored() -> list[Patch]:
    def descend(self: RadixCache, tokens: tuple[int, ...], extra_key: str) -> tuple[Node, int, int]:
        del extra_key
        return real_descend(self, tokens, "")

    def attach(
        self: RadixCache, parent: Node, tokens: tuple[int, ...], pages: list[int], extra_key: str
    ) -> Node:
        del extra_key
        return real_attach(self, parent, tokens, pages, "")

    real_descend, real_attach = RadixCache._descend, RadixCache._attach
    return [(RadixCache, "_descend", descend), (RadixCache, "_attach", attach)]


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


# ---- turns -----------------------------------------------------------------------------------------------------


@_mistake("tenants", "the router's queues serve arrival order instead of fair order")
def _arrival_order() -> list[Patch]:
    def order(self: RequestQueue, live: LiveRequest) -> tuple[int, float, int]:
        del self
        return (-live.request.priority, 0.0, live.arrival)

    return [(RequestQueue, "_order", order)]


@_mistake("tenants", "prefill workers serve the order of their policy, whoever holds most")
def _policy_order() -> list[Patch]:
    def least_served_first(waiting: Sequence[Req], present: Any) -> list[Req]:
        del present
        return list(waiting)

    return [(waiting_queue, "least_served_first", least_served_first)]


# ---- what is kept for requests below their share ---------------------------------------------------------------


@_mistake("tenants", "prefill workers keep nothing for those who hold little")
def _prefill_keeps_nothing() -> list[Patch]:
    def without(self: PrefillScheduler, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **named)
        self._words_kept = 0

    real = PrefillScheduler.__init__
    return [(PrefillScheduler, "__init__", without)]


@_mistake("tenants", "decode workers keep nothing for those who hold little")
def _decode_keeps_nothing() -> list[Patch]:
    def without(self: Admission, *arguments: Any) -> None:
        real(self, *arguments)
        self.pages_kept = self.slots_kept = 0

    real = Admission.__init__
    return [(Admission, "__init__", without)]


@_mistake("tenants", "decode workers keep slots but no pages")
def _decode_keeps_no_pages() -> list[Patch]:
    def without(self: Admission, *arguments: Any) -> None:
        real(self, *arguments)
        self.pages_kept = 0

    real = Admission.__init__
    return [(Admission, "__init__", without)]


@_mistake("tenants", "prefill workers give what they keep to nobody")
def _prefill_gives_nothing() -> list[Patch]:
    return [(prefill_scheduler, "is_below_share", _never)]


@_mistake("tenants", "decode workers give what they keep to nobody")
def _decode_gives_nothing() -> list[Patch]:
    return [(decode_admission, "is_below_share", _never)]


@_mistake("tenants", "a request is below its share although its tenant takes more than an even one")
def _below_without_share() -> list[Patch]:
    def is_below_share(req: Req, held: Any, size: int, capacity: float) -> bool:
        del size, capacity
        return real(req, held, 0, float("inf"))

    real = tenant_shares.is_below_share
    return [
        (prefill_scheduler, "is_below_share", is_below_share),
        (decode_admission, "is_below_share", is_below_share),
    ]


@_mistake("tenants", "a retracted request returns into the pages that are kept")
def _resumes_into_pages() -> list[Patch]:
    def resume(self: Retraction, present: list[Req]) -> Req | None:
        kept, self.pages_kept = self.pages_kept, 0
        req = real(self, present)
        self.pages_kept = kept
        return req

    real = Retraction.resume
    return [(Retraction, "resume", resume)]


def _never(req: Req, others: Any, size: int, capacity: float) -> bool:
    del req, others, size, capacity
    return False

"""The oracle for foresight at a router: a prompt is begun only where a decode worker will have pages for it.

What stands in front of a decode worker is counted here from the live requests, not from the router's books. A request
that has become longer since it was counted may take a page more or less, so there are two answers: surely, and perhaps.
"""

from __future__ import annotations

from math import inf

from router.core.dispatch import RouterCore
from router.core.fleet.worker import KvGroup, Worker
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest
from router.core.requests.request_table import BEFORE_DECODE


def surely_allowed(core: RouterCore, live: LiveRequest, kv_group: KvGroup) -> bool:
    """Whether the prompt may be begun, by a count that is too high if anything."""
    return _allowed(core, live, kv_group, slack=1)


def prove_foreseen(core: RouterCore, live: LiveRequest) -> None:
    """A prompt that has just been begun: some decode worker would have had room, by a count that may be too low."""
    assert _allowed(core, live, live.kv_group, slack=-1), (
        f"{live.rid} is begun, and no decode worker has room"
    )


def _allowed(core: RouterCore, live: LiveRequest, kv_group: KvGroup, *, slack: int) -> bool:
    if live.request.params.max_new_tokens <= 1:
        return True
    able = [
        worker
        for worker in core.fleet.workers.values()
        if worker.hello.role == "decode"
        and worker.kv_group == kv_group
        and not worker.draining
        and worker.fits(len(live.request.token_ids) + live.request.params.max_new_tokens)
    ]
    telling = [worker for worker in able if worker.load.pages_for_new >= 0]
    return not telling or any(
        _spare(core, worker, live, slack) >= 0 and _fetches_soon(core, worker, live, slack)
        for worker in telling
    )


def _spare(core: RouterCore, worker: Worker, live: LiveRequest, slack: int) -> float:
    """Pages that are left at the worker with this request, and others with `slack` more pages each."""
    load, page_size = worker.load, worker.hello.limits.page_size or 1
    own = -(-len(live.request.token_ids) // page_size) if worker.hello.limits.page_size else 0
    others = max(0, load.pages_foreseen)
    has_some = worker.assigned or load.queued or load.running
    if not (_coming(core, worker, live) or has_some or others):
        return (worker.hello.limits.pages or inf) - own
    tenants = {each.tenant for each in worker.assigned.values()}
    is_light = live.tenant.name not in tenants and (bool(tenants) or _is_only_one(core, worker, live))
    pages = load.free_pages if is_light or not has_some else load.pages_for_new
    # As many seconds of what comes back as a router that is alone counts on; none, for what it surely counts on.
    seconds = 0.5 * core.settings.ready_seconds if slack < 0 else 0.0
    return pages + load.pages_a_second * seconds - _in_front(core, worker, live, slack) - own


def _is_only_one(core: RouterCore, worker: Worker, live: LiveRequest) -> bool:
    """Whether its tenant has begun nothing else, and others have requests at the worker, from other routers.

    The worker has not refused the tenant lately, and might take it for below its share.
    """
    others = (each for each in core._requests.live.values() if each is not live)
    has_begun = any(e.tenant is live.tenant and e.state is not RequestState.WAITING for e in others)
    told = worker.load.queued + worker.load.running - worker.ended.requests
    longest = len(live.request.token_ids) + live.request.params.max_new_tokens - 1
    even = worker.hello.limits.pages * worker.hello.limits.page_size / 3
    return not has_begun and told > 0 and longest <= even and live.tenant.name not in worker.refused


def _fetches_soon(core: RouterCore, worker: Worker, live: LiveRequest, slack: int) -> bool:
    """Whether the links of the worker are busy with what stands in front for a part of `ready_seconds` at most."""
    load, ready_seconds = worker.load, core.settings.ready_seconds
    if not load.pages_arriving_a_second:
        return True
    share, prefill = (worker.fetched_share, ready_seconds) if slack < 0 else (1.0, 0.0)
    pages = load.pages_arriving + share * _in_front(core, worker, live, slack)
    return pages / load.pages_arriving_a_second <= 0.3 * ready_seconds + prefill


def _coming(core: RouterCore, worker: Worker, live: LiveRequest) -> list[LiveRequest]:
    """Other requests that are foreseen at the worker and not given to it yet: there they count as its own."""
    return [
        each
        for each in core._requests.live.values()
        if each is not live and each.foreseen_at is worker and each.state in BEFORE_DECODE
    ]


def _in_front(core: RouterCore, worker: Worker, live: LiveRequest, slack: int) -> int:
    """Pages of what comes to the worker, or has come since its last load."""
    pages = sum(max(0, worker.pages_for(each.need.tokens) + slack) for each in _coming(core, worker, live))
    pages += sum(each.pages for each in worker.assigned.values() if each.load_number == worker.load_number)
    return pages + sum(worker.reserved.values()) + max(0, worker.load.pages_foreseen)

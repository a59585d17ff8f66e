"""The oracle for foresight at a router: a prompt is begun only where a decode worker will have pages for it.

What stands in front of a decode worker is counted here from the live requests, not from the router's books. A request
that has become longer since it was counted may take a page more or less, so there are two answers: surely, and perhaps.
"""

from __future__ import annotations

from math import inf

from router.core.dispatch import RouterCore
from router.core.fleet.workers import KvGroup, Worker
from router.core.requests.live_request import LiveRequest


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
    return not telling or any(_spare(core, worker, live, slack) >= 0 for worker in telling)


def _spare(core: RouterCore, worker: Worker, live: LiveRequest, slack: int) -> float:
    """Pages that are left at the worker with this request, and others with `slack` more pages each."""
    others = [each for each in core._requests.live.values() if each is not live]
    coming = [each for each in others if each.foreseen_at is worker]
    load, page_size = worker.load, worker.hello.limits.page_size or 1
    own = -(-len(live.request.token_ids) // page_size) if worker.hello.limits.page_size else 0
    if not (coming or worker.assigned or load.queued or load.running):
        return (worker.hello.limits.pages or inf) - own
    is_light = bool(worker.assigned) and all(
        each.tenant != live.tenant.name for each in worker.assigned.values()
    )
    pages = load.free_pages if is_light else load.pages_for_new
    in_front = sum(max(0, worker.pages_for(each.need.tokens) + slack) for each in coming)
    in_front += sum(each.pages for each in worker.assigned.values() if each.load_number == worker.load_number)
    in_front += sum(worker.reserved.values())
    return pages + load.pages_a_second * core.settings.ready_seconds - in_front - own

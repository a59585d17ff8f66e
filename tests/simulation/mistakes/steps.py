"""Mistakes in the steps of a decode worker, what each carries, and who gets pages and when: see `mutations`."""

from __future__ import annotations

from typing import Any

from decode.lifecycle import DecodeEvent
from decode.transfer_queue import Transferred
from shared.kv.page_pool import PageState
from tests.simulation.mistakes.mutation import Mistakes, gives, nothing
from tests.simulation.mistakes.roles import get, put


def _joined_twice(_: Any, running: Any) -> tuple[Any, ...]:
    starting = [req for req in get(running, "requests that start") if req.slot is not None]
    put(running, "requests that start", [req for req in starting if req.launched_len == req.kv_len])
    return tuple(req.join(last_token=req.token_ids[-1]) for req in starting)


def _token_before(_: Any, running: Any) -> tuple[Any, ...]:
    starting = get(running, "requests that start")
    put(running, "requests that start", [])
    return tuple(req.join(last_token=req.token_ids[-2]) for req in starting if req.slot is not None)


def _before_it_landed(start: Any, queue: Any, req: Any, baton: Any, now: float) -> Any:
    arrived = start(queue, req, baton, now)
    if arrived is None:
        fetch_id = get(queue, "number of the next fetch") - 1
        get(queue, "a fetch is removed")(fetch_id)
        get(queue, "pages in quarantine")[fetch_id] = []
        queue.memory.pool.move(req.owned, PageState.ARRIVING, PageState.OWNED)
        arrived = get(queue, "a request arrives")(Transferred(req), DecodeEvent.LANDED)
    return arrived


def _without_page(grant_pages: Any, running: Any, growing: Any) -> Any:
    grants = grant_pages(running, growing)
    for req in growing:
        req.launched_max = max(req.launched_max, req.launched_len + 1)
    return grants


def _page_late(look_ahead: Any, running: Any, req: Any) -> None:
    look_ahead(running, req)
    if req.launched_max < req.final_kv_len:
        req.launched_max += 1


MISTAKES: dict[str, Mistakes] = {
    "steps": {
        "the step after the first carries the join, too, so a token is computed twice": {
            "requests start in a step": _joined_twice
        },
        "a request joins with the token before its last": {"requests start in a step": _token_before},
        "a request joins when its fetch starts": {"the fetch of a request starts": _before_it_landed},
        "a row without a page runs all the same": {"growing rows get pages": _without_page},
        "a page is looked for one step late": {"a row looks ahead for its next page": _page_late},
        "a flush forgets all but the last token of a request": {
            "a row is made": lambda row, rid, attempt, index, token_ids, logprobs: row(
                rid, attempt, index + len(token_ids) - 1, token_ids[-1:], logprobs[-1:]
            )
        },
    },
    "room": {
        "a step's pages are asked for one by one": {
            "each row of a step gets a page": lambda _, memory, reqs: sum(
                memory.allocate(req, 1) is not None for req in reqs
            )
        },
        "what one tenant holds is summed without those that came since": {"a request is counted in": nothing},
        "what one tenant holds is summed with those that have left": {"a request is counted anew": nothing},
        "what arrives may take the pages of the largest request": {
            "pages kept for the largest request": gives(0)
        },
        "requests that are known to end soon get no room to grow": {"room to grow": gives(0.0)},
        "cached pages that arriving requests hold count as room": {
            "pages held while requests arrive": lambda _, queue, _req: queue.memory.pool.count(
                PageState.ARRIVING
            )
        },
    },
}

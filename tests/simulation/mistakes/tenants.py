"""Mistakes in what tenants are charged, share, wait for and keep from each other: see `mutations`."""

from __future__ import annotations

import math
from typing import Any

from tests.simulation.mistakes.mutation import Mistakes, gives
from tests.simulation.mistakes.roles import get, put


def _charged_twice(push: Any, queue: Any, live: Any, tokens: int) -> None:
    live.starts.pop(get(queue, "the state whose requests a queue has"), None)
    push(queue, live, tokens)


def _stay(leave: Any, tenants: Any, tenant: Any, now: float) -> None:
    if tenant.live or now < 1.0:
        leave(tenants, tenant, now)


def _prefill_keeps_nothing(made: Any, prefill: Any, *arguments: Any, **named: Any) -> None:
    made(prefill, *arguments, **named)
    put(prefill, "leases that prefill keeps for others", 0)


def _decode_keeps_no_pages(made: Any, admission: Any, *arguments: Any, **named: Any) -> None:
    made(admission, *arguments, **named)
    admission.pages_kept = 0


def _decode_keeps_nothing(made: Any, admission: Any, *arguments: Any, **named: Any) -> None:
    _decode_keeps_no_pages(made, admission, *arguments, **named)
    admission.slots_kept = 0


def _below_without_share(is_below_share: Any, req: Any, held: Any, *_: Any) -> Any:
    return is_below_share(req, held, 0, math.inf)


def _resume_into_kept(resume: Any, retraction: Any, present: Any) -> Any:
    kept, retraction.pages_kept = retraction.pages_kept, 0
    req = resume(retraction, present)
    retraction.pages_kept = kept
    return req


MISTAKES: dict[str, Mistakes] = {
    "tenants": {
        "tenants read each other's caches": {
            "the key of a tenant's cache": lambda _, _tenant, salt, **_rest: salt
        },
        "pages of another key are found": {
            "tokens are looked up in the cache": lambda descend, cache, tokens, _key: descend(
                cache, tokens, ""
            ),
            "tokens are added to the cache": lambda attach, cache, parent, tokens, pages, _key: attach(
                cache, parent, tokens, pages, ""
            ),
        },
        "a request that returns to its queue is charged again": {"a request enters a queue": _charged_twice},
        "what a client that hung up did not use is not given back": {
            "a request of a queue has ended": lambda ended, queue, live, unused: ended(
                queue, live, unused if live.visits else 0
            )
        },
        "a tenant is not forgotten when its last request ends": {"a tenant leaves": _stay},
        # ---- turns ----
        "the router's queues serve arrival order instead of fair order": {
            "turns of a queue": lambda _, _queue, live: (
                not live.output,
                -live.request.priority,
                0.0,
                live.arrival,
            )
        },
        "prefill workers serve the order of their policy, whoever holds most": {
            "waiting prompts take turns": lambda _, waiting, _present: list(waiting)
        },
        # ---- what is kept for requests below their share ----
        "prefill workers keep nothing for those who hold little": {
            "a prefill scheduler is made": _prefill_keeps_nothing
        },
        "decode workers keep nothing for those who hold little": {
            "the admission of decode is made": _decode_keeps_nothing
        },
        "decode workers keep slots but no pages": {"the admission of decode is made": _decode_keeps_no_pages},
        "prefill workers give what they keep to nobody": {"prefill asks who is below a share": gives(False)},
        "decode workers give what they keep to nobody": {"decode asks who is below a share": gives(False)},
        "a request is below its share although its tenant takes more than an even one": {
            "prefill asks who is below a share": _below_without_share,
            "decode asks who is below a share": _below_without_share,
        },
        "a retracted request returns into the pages that are kept": {
            "a retracted request resumes": _resume_into_kept
        },
    },
}

"""Mistakes in what a router believes, and in how it goes on after an error: see `mutations`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from router.core.effects import EndSession, RequestCompleted, RequestEnded, Usage
from router.core.worker_events import books
from shared.wire.messages import Load
from tests.simulation.mistakes.mutation import Instead, Mistakes, gives, nothing
from tests.simulation.mistakes.roles import get


def _batons_pass_if(word: str) -> Instead:
    """A complaint that has this word is overheard."""

    def deaf(unsound: Callable[..., str], *arguments: Any) -> str:
        why = unsound(*arguments)
        return "" if word in why else why

    return {"a router checks a baton": deaf}


def _session_goes_on(drop: Any, faults: Any, *arguments: Any) -> None:
    drop(faults, *arguments)
    effects = get(faults, "effects of a fault")
    effects[:] = [each for each in effects if not isinstance(each, EndSession)]


def _strike_in_silence(_: Any, faults: Any, live: Any, now: float) -> None:
    books.strike(live, get(faults, "requests at a fault"), get(faults, "workers at a fault"), now)


def _strike_as_complete(_: Any, faults: Any, live: Any, now: float) -> None:
    _strike_in_silence(_, faults, live, now)
    effects = get(faults, "effects of a fault")
    if not any(isinstance(each, RequestEnded) and each.rid == live.rid for each in effects):
        effects.append(RequestEnded(live.rid, RequestCompleted("stop", live.usage)))


def _leave_if_known(_: Any, tenants: Any, tenant: Any, now: float) -> None:
    del now
    if not tenant.live:
        get(tenants, "tenants with requests").pop(tenant.name, None)


def _deaf_to_load(is_silent: Any, silences: Any, worker: Any, since: float) -> bool:
    load, worker.load = worker.load, Load()
    try:
        return bool(is_silent(silences, worker, since))
    finally:
        worker.load = load


def _convict_gently(convict: Any, silences: Any, worker: Any, now: float) -> None:
    assigned, worker.assigned = worker.assigned, {}
    convict(silences, worker, now)
    worker.assigned = assigned
    deadlines = get(silences, "requests of silent workers").reservations.deadlines
    deadlines.set(("silent", worker.peer), now + get(silences, "settings of silence").silent_seconds)


MISTAKES: dict[str, Mistakes] = {
    "lies": {
        "more tokens than a request asked for are delivered": {
            "more tokens than were asked for": gives(False)
        },
        "a baton may name any holder": _batons_pass_if("names the holder"),
        "a baton may name the agent of another holder": _batons_pass_if("names the agent"),
        "a baton may be of another request or attempt": _batons_pass_if("is of attempt"),
        "a baton may have any number of pages": _batons_pass_if("pages for"),
        "an error at a worker's message ends the router": {
            "an event of a link": lambda _, core, event, now: get(core, "an event of a link is taken in")(
                event, now
            )
        },
        "a worker is dropped, and its session goes on": {"a worker is dropped": _session_goes_on},
        "the request of a message that failed is struck and not answered": {
            "the request of a fault is struck": _strike_in_silence
        },
        "the request of a message that failed counts as complete": {
            "the request of a fault is struck": _strike_as_complete
        },
        "a request is answered and stays in the books": {
            "a failed request is struck from the books": nothing
        },
        "after a struck request the counts of before are believed": {"the books are counted anew": nothing},
        "the tenant of a struck request is never forgotten": {
            "a tenant is forgotten": nothing,
            "a tenant leaves": _leave_if_known,
        },
        "a client is told of more cached tokens than its prompt has": {
            "usage of a request": lambda _, live: Usage(
                live.request.charged_tokens, len(live.output), live.cached_tokens or 0
            )
        },
        "no worker is ever found silent": {"a worker is silent": gives(False)},
        "a silent worker is compared by what was sent before": {
            "others have answered meanwhile": lambda answered, silences, worker, unanswered: answered(
                silences, worker, replace(unanswered, sent_at=0.0)
            )
        },
        "a worker is found silent although no other has answered": {"others that must have answered": 0},
        "a worker is found silent although it reports requests": {"a worker is silent": _deaf_to_load},
        "a worker that was found silent is given more at once": {
            "a worker gets no work for a while": gives(False)
        },
        "what a silent worker had stays with it": {"a worker is found silent": _convict_gently},
    },
}

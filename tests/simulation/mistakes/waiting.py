"""Mistakes in what may wait, how long, and what counts as a loss: see `mutations`."""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from router.core.effects import RequestAborted, RequestFailed
from router.core.requests.lifecycle import RequestEvent
from tests.simulation.mistakes.mutation import Mistakes, gives, nothing
from tests.simulation.mistakes.roles import get


def _failed_fetch_is_a_loss(_: Any, replies: Any, live: Any, worker: Any, now: float) -> None:
    get(replies, "a request lost its worker")(live, worker, "unreachable", now, worker_has_released=True)


def _waits_on(_: Any, reservations: Any, live: Any, now: float) -> bool:
    reservations.deadlines.set(("stall", live.rid), now + 10.0)
    return False


def _gone_wakes_nobody(_: Any, core: Any, rid: str, now: float) -> None:
    requests = get(core, "requests of a router")
    live = requests.live.get(rid)
    if live is not None:
        requests.end(live, RequestEvent.CANCELLED, RequestAborted(), now)
    get(core, "pending requests are placed")(now)


def _counted_out_twice(down: Any, fleet: Any, peer: str) -> Any:
    worker = down(fleet, peer)
    if worker is not None and worker.draining:
        get(fleet, "a worker is counted")(worker, -1)
    return worker


def _each_loss_counts(count_loss: Any, live: Any, *arguments: Any) -> None:
    live.lost_at = -math.inf
    count_loss(live, *arguments)


def _begun_has_a_deadline(enqueue: Any, reservations: Any, live: Any) -> None:
    enqueue(reservations, live)
    if live.output:
        reservations.deadlines.set(("gone", live.rid), live.token_at + 0.3)


def _foreseen_for_ever(foresee: Any, reservations: Any, live: Any, worker: Any) -> None:
    if worker is not None or (live.worker is None and live.holder is None):
        foresee(reservations, live, worker)


def _foreseen_until_joined(fetch: Any, table: Any, live: Any, *placed: Any) -> None:
    foreseen_at = live.foreseen_at
    fetch(table, live, *placed)
    get(table.reservations, "a request is foreseen at a worker")(live, foreseen_at)


def _joined_after_all(join: Any, table: Any, live: Any, *told: Any) -> None:
    join(table, live, *told)
    get(table.reservations, "a request is foreseen at a worker")(live, None)


def _told_by_those_gone(end: Any, sessions: Any, router: str) -> None:
    told = dict(get(sessions, "pages that routers have told"))
    end(sessions, router)
    get(sessions, "pages that routers have told").update(told)


def _told_until_more_is_begun(tell: Any, reservations: Any) -> None:
    for worker in get(reservations, "workers for which something was begun or sent"):
        worker.foreseen_told = max(worker.foreseen_told, sum(worker.foreseen.values()))
    tell(reservations)


def _held_for_ever(seconds_to_fetch: Any, worker: Any) -> float:
    rate = worker.load.pages_arriving_a_second
    return float(seconds_to_fetch(worker) + (worker.own.pages / rate if rate else 0.0))


def _begun_is_refused(requeue: Any, requests: Any, live: Any, event: Any, now: float, **said: Any) -> None:
    if live.output and event is RequestEvent.NO_ROOM:
        failed = RequestFailed(503, "There is no room.", code="no_worker")
        requests.end(live, RequestEvent.EXPIRED, failed, now, worker_has_released=True)
    else:
        requeue(requests, live, event, now, **said)


def _pause_is_no_sign_of_life(paused: Any, replies: Any, worker: Any, message: Any, now: float) -> None:
    live = get(replies, "requests that are spoken of").live.get(message.rid)
    heard_at = live.heard_at if live is not None else 0.0
    paused(replies, worker, message, now)
    if live is not None:
        live.heard_at = heard_at


def _pause_has_no_cause(paused: Any, replies: Any, worker: Any, message: Any, now: float) -> None:
    live = get(replies, "requests that are spoken of").live.get(message.rid)
    cause = live.held_up_by if live is not None else "other"
    paused(replies, worker, message, now)
    if live is not None:
        live.held_up_by = cause


def _pause_of_any_attempt(paused: Any, replies: Any, worker: Any, message: Any, now: float) -> None:
    live = get(replies, "requests that are spoken of").live.get(message.rid)
    attempt = live.attempt if live is not None else message.attempt
    paused(replies, worker, replace(message, attempt=attempt), now)


def _pause_by_any_worker(paused: Any, replies: Any, worker: Any, message: Any, now: float) -> None:
    live = get(replies, "requests that are spoken of").live.get(message.rid)
    paused(replies, live.worker or worker if live is not None else worker, message, now)


def _order_of_arrival_alone(_: Any, queue: Any, live: Any) -> Any:
    start = live.starts[get(queue, "the state whose requests a queue has")]
    return (True, -live.request.priority, start, live.arrival)


def _target_after_the_first_token(enqueue: Any, reservations: Any, live: Any) -> None:
    enqueue(reservations, live)
    if live.output and live.target_seconds:
        reservations.deadlines.set(("wait", live.rid), live.arrived_at + live.target_seconds)


def _target_from_placement(wait: Any, table: Any, live: Any, now: float, until: float) -> None:
    wait(table, live, now, until)
    if live.target_seconds:
        live.wait_until = now + live.target_seconds


def _queued_from_the_placement(
    begin: Any, first_at: float, sent_at: float, fetch_seconds: float | None = None
) -> Any:
    return begin(max(first_at, sent_at), sent_at, fetch_seconds)


MISTAKES: dict[str, Mistakes] = {
    "targets": {
        "a target counts from the last placement, not from the arrival": {
            "a request may wait": _target_from_placement
        },
        "a stream that has its first token is dropped for its target": {
            "a request waits in a queue": _target_after_the_first_token
        },
        "a deadline counts only where the deployment has a target": {
            "the target of a request": lambda target_of, request, settings: (
                target_of(request, settings) if settings.ttft_target_seconds else 0.0
            )
        },
    },
    "foresight": {
        "what stands in front of decode is not taken off what will be free": {
            "pages are foreseen at a worker": lambda _, worker, _tenant, seconds, _only_max: (
                worker.load.pages_for_new + worker.load.pages_a_second * seconds
            )
        },
        "what stands in front of decode is not taken off what links bring": {
            "the links of a worker are busy": gives(0.0)
        },
        "pages that were sent to a worker are in front of its links until their requests end": {
            "the links of a worker are busy": _held_for_ever
        },
        "a request is counted in front of decode until it ends, also when it is there": {
            "a request is foreseen at a worker": _foreseen_for_ever
        },
        "a router counts on pages for which others have begun prompts": {
            "pages in front of a new request": lambda real, worker: (
                real(worker) - max(0, worker.load.pages_foreseen)
            )
        },
        "a router hears of what it has begun itself as if others had": {
            "a router is told a load": lambda _, _sessions, _router, load: load
        },
        "what a router had begun that is gone stays in front of decode": {
            "a session with a router ends": _told_by_those_gone
        },
        "a worker hears of what is begun for it, and not that it was sent elsewhere": {
            "workers are told what is begun for them": _told_until_more_is_begun
        },
        "a request counts twice in front of decode until it has joined": {
            "a request is fetched": _foreseen_until_joined,
            "a request has joined": _joined_after_all,
        },
    },
    "begun streams": {
        "a stream that has begun has a deadline": {"a request waits in a queue": _begun_has_a_deadline},
        "a stream that has begun is refused for lack of room": {
            "a request goes back to its queue": _begun_is_refused
        },
        "streams that have begun wait behind new prompts": {"turns of a queue": _order_of_arrival_alone},
        "a group begins new prompts while a begun stream is late": {"streams are late": gives(frozenset())},
        "a late stream bars tenants for what they have begun in other groups": {
            "decode has enough in front of it": lambda real, parts, tenant, now: (
                real(parts, tenant, now)
                | (get(parts, "streams are late")(now) if tenant.begun else frozenset())
            )
        },
        "a full worker could not continue a stream": {"a worker could continue a stream": gives(False)},
    },
    "gaps": {
        "the time in the queue for decode is nobody's": {"a hand-over begins": _queued_from_the_placement}
    },
    "pauses": {
        "a paused stream is taken for forgotten": {
            "a worker keeps a request that does not run": _pause_is_no_sign_of_life
        },
        "nobody is told that a stream was paused": {
            "a worker keeps a request that does not run": _pause_has_no_cause
        },
        "a pause of an older attempt counts": {
            "a worker keeps a request that does not run": _pause_of_any_attempt
        },
        "a pause that another worker tells counts": {
            "a worker keeps a request that does not run": _pause_by_any_worker
        },
    },
    "ageing": {
        "a policy starves those that it puts last": {
            "those that have waited long go first": lambda _, ordered, _came_by: list(ordered)
        },
        "of those that have waited long the youngest goes first": {
            "those that have waited long go first": lambda aged_first, ordered, came_by: sorted(
                aged_first(ordered, came_by), key=lambda req: req.arrived_at > came_by or -req.sequence
            )
        },
    },
    "waiting": {
        "as much is computed as prefill can, whatever decode takes": {
            "decode has enough in front of it": gives(frozenset())
        },
        "at a rate of nothing, nothing is computed": {
            "what may stand in front of decode at any rate": gives(0)
        },
        "a new request is expected to wait for all others, whosever turn it is": {
            "the place of a new request": lambda _, queue, _tenant, _priority: len(queue)
        },
        "a request that its worker has forgotten is waited for": {"a request has stalled": _waits_on},
        "after events of links nothing is placed before the next client or deadline": {
            "the router settles": nothing
        },
        "the place of a client that has gone stays empty until something else happens": {
            "a client cancels": _gone_wakes_nobody
        },
        "a draining worker is counted out when it drains, and again when it goes": {
            "a worker goes": _counted_out_twice
        },
    },
    "partitions": {
        "a worker that cannot fetch the pages is a lost worker": {
            "a worker could not fetch": _failed_fetch_is_a_loss
        },
        "a worker that could not fetch the pages is asked for them again": {
            "workers not yet tried": lambda _, _core, _live, workers, _now: workers
        },
    },
    "links": {"a worker whose loop hangs keeps its sessions": {"a loop hangs": gives(False)}},
    "losses": {"workers that die together are as many losses": {"a loss is counted": _each_loss_counts}},
}

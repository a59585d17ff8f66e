"""Mistakes in what a router believes, and in how it goes on after an error: see `mutations`."""

from __future__ import annotations

from dataclasses import replace

import router.core.worker_events.silent_workers
import router.core.worker_events.worker_replies
from router.core.dispatch import RouterCore
from router.core.effects import EndSession, RequestCompleted, RequestEnded, Usage
from router.core.fleet.assignments import Assignment
from router.core.fleet.workers import Fleet, Worker
from router.core.requests.live_request import LiveRequest
from router.core.requests.request_table import RequestTable
from router.core.requests.tenants import Tenant, Tenants
from router.core.worker_events import books
from router.core.worker_events.silent_workers import SilentWorkers
from router.core.worker_events.sound_batons import unsound_baton
from router.core.worker_events.worker_faults import WorkerFaults
from shared.links.events import LinkEvent
from shared.wire.baton import Baton
from shared.wire.messages import Load, Prefilled, Row
from tests.simulation.mistakes.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("lies", "more tokens than a request asked for are delivered")
def _surplus() -> list[Patch]:
    def exceeds(live: LiveRequest, tokens: Prefilled | Row) -> bool:
        del live, tokens
        return False

    return [(router.core.worker_events.worker_replies, "_exceeds", exceeds)]


def _batons_pass_if(word: str) -> list[Patch]:
    """A complaint that has this word is overheard."""

    def deaf(baton: Baton, live: LiveRequest, sender: Worker, output_len: int) -> str:
        why = unsound_baton(baton, live, sender, output_len)
        return "" if word in why else why

    return [(router.core.worker_events.worker_replies, "unsound_baton", deaf)]


@_mistake("lies", "a baton may name any holder")
def _any_holder() -> list[Patch]:
    return _batons_pass_if("names the holder")


@_mistake("lies", "a baton may name the agent of another holder")
def _any_agent() -> list[Patch]:
    return _batons_pass_if("names the agent")


@_mistake("lies", "a baton may be of another request or attempt")
def _any_request() -> list[Patch]:
    return _batons_pass_if("is of attempt")


@_mistake("lies", "a baton may have any number of pages")
def _any_pages() -> list[Patch]:
    return _batons_pass_if("pages for")


@_mistake("lies", "an error at a worker's message ends the router")
def _no_guard() -> list[Patch]:
    def link(self: RouterCore, event: LinkEvent, now: float) -> None:
        self._link(event, now)

    return [(RouterCore, "link", link)]


@_mistake("lies", "a worker is dropped, and its session goes on")
def _session_goes_on() -> list[Patch]:
    drop = WorkerFaults.drop

    def quietly(
        self: WorkerFaults, peer: str, said: str, about: LiveRequest | None, error: Exception, now: float
    ) -> None:
        drop(self, peer, said, about, error, now)
        self._effects[:] = [each for each in self._effects if not isinstance(each, EndSession)]

    return [(WorkerFaults, "drop", quietly)]


@_mistake("lies", "the request of a message that failed is struck and not answered")
def _unanswered() -> list[Patch]:
    def strike(self: WorkerFaults, live: LiveRequest, now: float) -> None:
        books.strike(live, self._requests, self._fleet, now)

    return [(WorkerFaults, "_strike", strike)]


@_mistake("lies", "the request of a message that failed counts as complete")
def _complete() -> list[Patch]:
    def strike(self: WorkerFaults, live: LiveRequest, now: float) -> None:
        books.strike(live, self._requests, self._fleet, now)
        if not any(isinstance(each, RequestEnded) and each.rid == live.rid for each in self._effects):
            self._effects.append(RequestEnded(live.rid, RequestCompleted("stop", live.usage)))

    return [(WorkerFaults, "_strike", strike)]


@_mistake("lies", "a request is answered and stays in the books")
def _stays() -> list[Patch]:
    def strike(live: LiveRequest, requests: RequestTable, fleet: Fleet, now: float) -> None:
        del live, requests, fleet, now

    return [(books, "strike", strike)]


@_mistake("lies", "a struck request keeps its room at a worker")
def _kept_room() -> list[Patch]:
    def forget(self: Fleet, rid: str) -> list[Worker]:
        del self, rid
        return []

    return [(Fleet, "forget", forget)]


@_mistake("lies", "after a struck request the counts of before are believed")
def _old_counts() -> list[Patch]:
    def count_anew(requests: RequestTable) -> None:
        del requests

    return [(books, "_count_anew", count_anew)]


@_mistake("lies", "the tenant of a struck request is never forgotten")
def _tenant_stays() -> list[Patch]:
    def forget(self: Tenants, tenant: Tenant, now: float) -> None:
        del self, tenant, now

    def leave_if_known(self: Tenants, tenant: Tenant, now: float) -> None:
        del now
        if not tenant.live:
            self._live.pop(tenant.name, None)

    return [(Tenants, "forget", forget), (Tenants, "leave", leave_if_known)]


@_mistake("lies", "a client is told of more cached tokens than its prompt has")
def _cached() -> list[Patch]:
    def usage(live: LiveRequest) -> Usage:
        return Usage(live.request.charged_tokens, len(live.output), live.cached_tokens or 0)

    return [(LiveRequest, "usage", property(usage))]


@_mistake("lies", "no worker is ever found silent")
def _never_silent() -> list[Patch]:
    def is_silent(self: SilentWorkers, worker: Worker, since: float) -> bool:
        del self, worker, since
        return False

    return [(SilentWorkers, "_is_silent", is_silent)]


@_mistake("lies", "a silent worker is compared by what was sent before")
def _sent_before() -> list[Patch]:
    others_answered = SilentWorkers._others_answered

    def by_all(self: SilentWorkers, worker: Worker, unanswered: Assignment) -> bool:
        return others_answered(self, worker, replace(unanswered, sent_at=0.0))

    return [(SilentWorkers, "_others_answered", by_all)]


@_mistake("lies", "a worker is found silent although no other has answered")
def _alone() -> list[Patch]:
    return [(router.core.worker_events.silent_workers, "COMPARED_MIN", 0)]


@_mistake("lies", "a worker is found silent although it reports requests")
def _reports() -> list[Patch]:
    is_silent = SilentWorkers._is_silent

    def deaf(self: SilentWorkers, worker: Worker, since: float) -> bool:
        load, worker.load = worker.load, Load()
        try:
            return is_silent(self, worker, since)
        finally:
            worker.load = load

    return [(SilentWorkers, "_is_silent", deaf)]


@_mistake("lies", "a worker that was found silent is given more at once")
def _given_more() -> list[Patch]:
    def is_withheld(self: Worker) -> bool:
        del self
        return False

    return [(Worker, "_is_withheld", is_withheld)]


@_mistake("lies", "what a silent worker had stays with it")
def _stays_there() -> list[Patch]:
    convict = SilentWorkers._convict

    def gently(self: SilentWorkers, worker: Worker, now: float) -> None:
        assigned, worker.assigned = worker.assigned, {}
        convict(self, worker, now)
        worker.assigned = assigned
        self._requests.reservations.deadlines.set(
            ("silent", worker.peer), now + self._settings.silent_seconds
        )

    return [(SilentWorkers, "_convict", gently)]

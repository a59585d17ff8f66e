"""Mistakes in how workers drain and requests migrate: see `mutations`."""

from __future__ import annotations

from typing import Any

import msgspec

from decode.lifecycle import DecodeEvent
from decode.migration import Migrations
from decode.output_buffer import OutputBuffer
from decode.scheduler import DecodeScheduler
from router.core.dispatch import RouterCore
from router.core.drain import RouterDrain
from router.core.fleet.workers import Worker
from router.core.queueing.backfill import PlacementPass
from router.core.requests.reservations import Reservations
from shared.batch.effects import Send
from shared.scheduling.request_states import RequestStates
from shared.scheduling.router_sessions import RouterSessions
from shared.wire.messages import Migrating
from tests.simulation.mistakes.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("migration", "a baton promises what the step in flight will write")
def _leased_early() -> list[Patch]:
    def lease_settled(self: Migrations, now: float) -> list[Any]:
        for req in self.settling:
            req.kv_len = req.launched_len
        return real(self, now)

    real = Migrations.lease_settled
    return [(Migrations, "lease_settled", lease_settled)]


@_mistake("migration", "a migrating request stays in the batch")
def _stays() -> list[Patch]:
    def start(self: Migrations) -> None:
        running = dict(self.batch.running)
        real(self)
        self.batch.running.update(running)

    real = Migrations.start
    return [(Migrations, "start", start)]


@_mistake("migration", "the state of a migrating request is not advanced")
def _state_left() -> list[Patch]:
    def advance(self: RequestStates[Any, Any], req: Any, event: Any) -> None:
        if event is not DecodeEvent.MIGRATION_STARTED:
            real(self, req, event)

    real = RequestStates.advance
    return [(RequestStates, "advance", advance)]


@_mistake("migration", "a migration overtakes the last tokens")
def _move_first() -> list[Patch]:
    def lease_settled(self: Migrations, now: float) -> list[Any]:
        buffer, self.output_buffer = self.output_buffer, OutputBuffer(0.0)
        leased = real(self, now)
        self.output_buffer = buffer
        return leased

    real = Migrations.lease_settled
    return [(Migrations, "lease_settled", lease_settled)]


@_mistake("migration", "the pages of a migrating request are given up at once")
def _not_held() -> list[Patch]:
    def lease_settled(self: Migrations, now: float) -> list[Any]:
        leased = real(self, now)
        for req in leased:
            self.leases.cancel(req.rid, req.attempt)
        return leased

    real = Migrations.lease_settled
    return [(Migrations, "lease_settled", lease_settled)]


@_mistake("migration", "a migrating request is leased with one page too few")
def _page_short() -> list[Patch]:
    def lease_settled(self: Migrations, now: float) -> list[Any]:
        leased = real(self, now)
        for number, effect in enumerate(self.effects):
            if isinstance(effect, Send) and isinstance(effect.message, Migrating):
                pages = effect.message.baton.pages
                if len(pages) > 1 and pages[-1] != pages[0]:
                    short = _with_pages(effect.message, (*pages[:-1], pages[0]))
                    self.effects[number] = Send(effect.peer, short)
        return leased

    real = Migrations.lease_settled
    return [(Migrations, "lease_settled", lease_settled)]


@_mistake("draining", "a draining worker ends while its pages are still leased")
def _ends_early() -> list[Patch]:
    def drained(self: DecodeScheduler) -> bool:
        return not self._reqs

    return [(DecodeScheduler, "drained", property(drained))]


@_mistake("draining", "a worker does not wait until the routers know that it drains")
def _unacknowledged() -> list[Patch]:
    return [(RouterSessions, "drained", property(lambda self: not self._leases))]


@_mistake("draining", "a draining worker is still given work")
def _still_given() -> list[Patch]:
    def takes_work(self: Worker) -> bool:
        return self.load.accepting

    return [(Worker, "takes_work", takes_work)]


@_mistake("draining", "room that was kept for a migration is never given back")
def _reserved_for_ever() -> list[Patch]:
    def forget_target(self: Reservations, live: Any) -> None:
        del self
        live.target = None

    return [(Reservations, "forget_target", forget_target)]


@_mistake("draining", "new requests take the room that streams of a draining worker need")
def _new_ones_first() -> list[Patch]:
    def place_ready(self: RouterCore, now: float) -> None:
        attempts = PlacementPass(self.settings.backfill_max)
        self._serve(self._requests.reservations.ready.in_order(), self._to_decode, attempts, now)
        self._request_migrations(now)

    return [(RouterCore, "_place_ready", place_ready)]


def _with_pages(moving: Migrating, pages: tuple[int, ...]) -> Migrating:
    return msgspec.structs.replace(moving, baton=msgspec.structs.replace(moving.baton, pages=pages))


@_mistake("router_drain", "a draining router does not wait for its open answers")
def _answers_ignored() -> list[Patch]:
    def tick(self: RouterDrain, now: float, open_answers: int) -> None:
        del open_answers
        real(self, now, 0)

    real = RouterDrain.tick
    return [(RouterDrain, "tick", tick)]


@_mistake("router_drain", "a draining router refuses requests before proxies know")
def _no_lag() -> list[Patch]:
    def without_lag(self: RouterDrain, lag_seconds: float, drain_seconds: float) -> None:
        real(self, 0 * lag_seconds, drain_seconds)

    real = RouterDrain.__init__
    return [(RouterDrain, "__init__", without_lag)]


@_mistake("router_drain", "a draining router cuts its answers with the end of the lag")
def _no_drain() -> list[Patch]:
    def without_drain(self: RouterDrain, lag_seconds: float, drain_seconds: float) -> None:
        real(self, lag_seconds, 0 * drain_seconds)

    real = RouterDrain.__init__
    return [(RouterDrain, "__init__", without_drain)]

"""Mistakes in how workers leave and requests move: see `tests.simulation.mutations`."""

from __future__ import annotations

from typing import Any

import msgspec

from decode.migration import Migrations
from decode.output_buffer import OutputBuffer
from decode.scheduler import DecodeScheduler
from router.core.drain import RouterDrain
from router.core.fleet import Worker
from router.core.request_table import RequestTable
from shared.effects import Send
from shared.messages import Migrating
from shared.scheduling.router_sessions import RouterSessions
from tests.simulation.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("departures", "a baton promises what the step in flight will write")
def _lent_early() -> list[Patch]:
    def lend_settled(self: Migrations, now: float) -> list[Any]:
        for req in self._departing:
            req.kv_len = req.launched_len
        return real(self, now)

    real = Migrations.lend_settled
    return [(Migrations, "lend_settled", lend_settled)]


@_mistake("departures", "a moving request stays in the batch")
def _stays() -> list[Patch]:
    def take_out(self: Migrations) -> None:
        running = dict(self.batch.running)
        real(self)
        self.batch.running.update(running)

    real = Migrations.take_out
    return [(Migrations, "take_out", take_out)]


@_mistake("departures", "a move overtakes the last tokens")
def _move_first() -> list[Patch]:
    def lend_settled(self: Migrations, now: float) -> list[Any]:
        unsent, self.unsent = self.unsent, OutputBuffer(0.0)
        lent = real(self, now)
        self.unsent = unsent
        return lent

    real = Migrations.lend_settled
    return [(Migrations, "lend_settled", lend_settled)]


@_mistake("departures", "the pages of a moving request are given up at once")
def _not_held() -> list[Patch]:
    def lend_settled(self: Migrations, now: float) -> list[Any]:
        lent = real(self, now)
        for req in lent:
            self.leases.cancel(req.rid, req.attempt)
        return lent

    real = Migrations.lend_settled
    return [(Migrations, "lend_settled", lend_settled)]


@_mistake("departures", "a request is told to move with one page too few")
def _page_short() -> list[Patch]:
    def lend_settled(self: Migrations, now: float) -> list[Any]:
        lent = real(self, now)
        for number, effect in enumerate(self.effects):
            if isinstance(effect, Send) and isinstance(effect.message, Migrating):
                pages = effect.message.baton.pages
                if len(pages) > 1 and pages[-1] != pages[0]:
                    short = _with_pages(effect.message, (*pages[:-1], pages[0]))
                    self.effects[number] = Send(effect.peer, short)
        return lent

    real = Migrations.lend_settled
    return [(Migrations, "lend_settled", lend_settled)]


@_mistake("leaving", "a leaving worker ends while its pages are still lent")
def _ends_early() -> list[Patch]:
    def empty(self: DecodeScheduler) -> bool:
        return not self._reqs

    return [(DecodeScheduler, "empty", property(empty))]


@_mistake("leaving", "a worker does not wait until the routers know that it leaves")
def _undismissed() -> list[Patch]:
    return [(RouterSessions, "dismissed", property(lambda self: self is not None))]


@_mistake("leaving", "a worker that leaves is still given work")
def _still_given() -> list[Patch]:
    def takes_work(self: Worker, now: float) -> bool:
        return self.load.accepting and now >= self.paused_until

    return [(Worker, "takes_work", takes_work)]


@_mistake("leaving", "room that was kept for a move is never given back")
def _reserved_for_ever() -> list[Patch]:
    def forget_target(self: RequestTable, live: Any) -> None:
        del self
        live.target = None

    return [(RequestTable, "forget_target", forget_target)]


@_mistake("router drain", "a draining router does not wait for its open answers")
def _answers_ignored() -> list[Patch]:
    def tick(self: RouterDrain, now: float, open_answers: int) -> None:
        del open_answers
        real(self, now, 0)

    real = RouterDrain.tick
    return [(RouterDrain, "tick", tick)]


@_mistake("router drain", "a draining router refuses requests before proxies know")
def _no_lag() -> list[Patch]:
    def without_lag(self: RouterDrain, lag_seconds: float, drain_seconds: float) -> None:
        real(self, 0 * lag_seconds, drain_seconds)

    real = RouterDrain.__init__
    return [(RouterDrain, "__init__", without_lag)]


@_mistake("router drain", "a draining router cuts its answers with the end of the lag")
def _no_drain() -> list[Patch]:
    def without_drain(self: RouterDrain, lag_seconds: float, drain_seconds: float) -> None:
        real(self, lag_seconds, 0 * drain_seconds)

    real = RouterDrain.__init__
    return [(RouterDrain, "__init__", without_drain)]


def _with_pages(moving: Migrating, pages: tuple[int, ...]) -> Migrating:
    return msgspec.structs.replace(moving, baton=msgspec.structs.replace(moving.baton, pages=pages))

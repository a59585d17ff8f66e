"""Mistakes in how workers leave and requests move: see `tests.simulation.mutations`."""

from __future__ import annotations

from typing import Any

import msgspec

from decode.migration import Departures
from decode.output_buffer import Unsent
from decode.scheduler import DecodeScheduler
from router.core.fleet import Worker
from router.core.request_table import LiveRequests
from shared.effects import Send
from shared.messages import Moving
from shared.scheduling.router_sessions import Audience
from tests.simulation.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("departures", "a baton promises what the step in flight will write")
def _lent_early() -> list[Patch]:
    def lend_settled(self: Departures, now: float) -> list[Any]:
        for req in self._departing:
            req.kv_len = req.launched_len
        return real(self, now)

    real = Departures.lend_settled
    return [(Departures, "lend_settled", lend_settled)]


@_mistake("departures", "a moving request stays in the batch")
def _stays() -> list[Patch]:
    def take_out(self: Departures) -> None:
        running = dict(self.batch.running)
        real(self)
        self.batch.running.update(running)

    real = Departures.take_out
    return [(Departures, "take_out", take_out)]


@_mistake("departures", "a move overtakes the last tokens")
def _move_first() -> list[Patch]:
    def lend_settled(self: Departures, now: float) -> list[Any]:
        unsent, self.unsent = self.unsent, Unsent(0.0)
        lent = real(self, now)
        self.unsent = unsent
        return lent

    real = Departures.lend_settled
    return [(Departures, "lend_settled", lend_settled)]


@_mistake("departures", "the pages of a moving request are given up at once")
def _not_held() -> list[Patch]:
    def lend_settled(self: Departures, now: float) -> list[Any]:
        lent = real(self, now)
        for req in lent:
            self.lending.cancel(req.rid, req.attempt)
        return lent

    real = Departures.lend_settled
    return [(Departures, "lend_settled", lend_settled)]


@_mistake("departures", "a request is told to move with one page too few")
def _page_short() -> list[Patch]:
    def lend_settled(self: Departures, now: float) -> list[Any]:
        lent = real(self, now)
        for number, effect in enumerate(self.effects):
            if isinstance(effect, Send) and isinstance(effect.message, Moving):
                pages = effect.message.baton.pages
                if len(pages) > 1 and pages[-1] != pages[0]:
                    short = _with_pages(effect.message, (*pages[:-1], pages[0]))
                    self.effects[number] = Send(effect.peer, short)
        return lent

    real = Departures.lend_settled
    return [(Departures, "lend_settled", lend_settled)]


@_mistake("leaving", "a leaving worker ends while its pages are still lent")
def _ends_early() -> list[Patch]:
    def empty(self: DecodeScheduler) -> bool:
        return not self._reqs

    return [(DecodeScheduler, "empty", property(empty))]


@_mistake("leaving", "a worker does not wait until the routers know that it leaves")
def _undismissed() -> list[Patch]:
    return [(Audience, "dismissed", property(lambda self: self is not None))]


@_mistake("leaving", "a worker that leaves is still given work")
def _still_given() -> list[Patch]:
    def takes_work(self: Worker, now: float) -> bool:
        return self.load.accepting and now >= self.paused_until

    return [(Worker, "takes_work", takes_work)]


@_mistake("leaving", "room that was kept for a move is never given back")
def _reserved_for_ever() -> list[Patch]:
    def forget_target(self: LiveRequests, live: Any) -> None:
        del self
        live.target = None

    return [(LiveRequests, "forget_target", forget_target)]


def _with_pages(moving: Moving, pages: tuple[int, ...]) -> Moving:
    return msgspec.structs.replace(moving, baton=msgspec.structs.replace(moving.baton, pages=pages))

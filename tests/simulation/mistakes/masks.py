"""Mistakes about rows that a step has no time for."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from decode.running_batch import RunningBatch
from decode.scheduler import DecodeScheduler
from shared.batch.req import Req
from shared.batch.schedule_batch import ScheduleBatch
from shared.engine.sampling.grammars import TimedMatcher
from shared.engine.sampling.mask_budget import MaskBudget
from shared.wire.sampled import Sampled
from tests.simulation.mistakes.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("masks", "a row that sits a step out takes an unmasked token")
def _unmasked() -> list[Patch]:
    def settle(self: DecodeScheduler, batch: ScheduleBatch, sampled: Sampled, now: float) -> None:
        real(self, batch, replace(sampled, sat_out=()), now)

    real = DecodeScheduler.settle
    return [(DecodeScheduler, "settle", settle)]


@_mistake("masks", "a row that sits a step out loses its token")
def _lost() -> list[Patch]:
    def settle(self: RunningBatch, step: int, sat_out: Collection[int] = ()) -> list[Req]:
        del sat_out
        return real(self, step)

    real = RunningBatch.settle
    return [(RunningBatch, "settle", settle)]


@_mistake("masks", "a matcher forgets the tokens that it had no time for")
def _forgotten() -> list[Patch]:
    def mask(self: TimedMatcher, seconds: float = math.inf) -> bytes | None:
        bits = real(self, seconds)
        if bits is None:
            self._behind.clear()
        return bits

    real = TimedMatcher.mask
    return [(TimedMatcher, "mask", mask)]


@_mistake("masks", "the rows in front have their masks first, in every step")
def _starved() -> list[Patch]:
    def end_turn(self: MaskBudget, slot: int) -> None:
        del self, slot

    return [(MaskBudget, "_end_turn", end_turn)]


@_mistake("masks", "what a mask took beyond the budget is nobody's")
def _forgiven() -> list[Patch]:
    def pay(self: MaskBudget, left: dict[str, float], left_of_all: float) -> None:
        del self, left, left_of_all

    return [(MaskBudget, "_pay", pay)]


@_mistake("masks", "masks take the time of the tenant that had the slot before")
def _of_another() -> list[Patch]:
    def join(self: MaskBudget, slot: int, tenant: str) -> None:
        real(self, slot, self._tenants.get(slot, tenant))

    real = MaskBudget.join
    return [(MaskBudget, "join", join)]

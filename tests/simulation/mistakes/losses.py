"""Mistakes in the judgement of lost workers: see `mutations`."""

from __future__ import annotations

import math

from router.core.requests.live_request import LiveRequest
from shared.primitives.loop_watch import LoopWatch
from tests.simulation.mistakes.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("links", "a worker whose loop hangs keeps its sessions")
def _hangs_unnoticed() -> list[Patch]:
    def hangs(self: LoopWatch, now: float) -> bool:
        del self, now
        return False

    return [(LoopWatch, "hangs", hangs)]


@_mistake("losses", "workers that die together are as many losses")
def _each_counts() -> list[Patch]:
    def count_loss(self: LiveRequest, peer: str, now: float, event_seconds: float) -> None:
        self.lost_at = -math.inf
        real(self, peer, now, event_seconds)

    real = LiveRequest.count_loss
    return [(LiveRequest, "count_loss", count_loss)]

"""Mistakes in the links' judgement of a worker: see `tests.simulation.mutations`."""

from __future__ import annotations

from shared.loop_watch import LoopWatch
from tests.simulation.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("links", "a worker whose loop hangs keeps its sessions")
def _hangs_unnoticed() -> list[Patch]:
    def hangs(self: LoopWatch, now: float) -> bool:
        del self, now
        return False

    return [(LoopWatch, "hangs", hangs)]

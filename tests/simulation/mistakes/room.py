"""Mistakes in the room of a decode worker, who gets pages and when: see `mutations`."""

from __future__ import annotations

from collections.abc import Sequence

from decode.admission import Admission
from decode.growth import ExpectedGrowth
from decode.transfer_queue import TransferQueue
from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.kv.page_pool import PageState
from tests.simulation.mistakes.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("room", "a step's pages are asked for one by one")
def _page_by_page() -> list[Patch]:
    def allocate_one_each(self: KvMemory, reqs: Sequence[Req]) -> int:
        return sum(self.allocate(req, 1) is not None for req in reqs)

    return [(KvMemory, "allocate_one_each", allocate_one_each)]


@_mistake("room", "what one tenant holds is summed without those that came since")
def _came_uncounted() -> list[Patch]:
    return [(Admission, "on_admitted", lambda *_: None)]


@_mistake("room", "what one tenant holds is summed with those that have left")
def _left_counted() -> list[Patch]:
    return [(Admission, "on_change", lambda *_: None)]


@_mistake("room", "what arrives may take the pages of the largest request")
def _nothing_kept() -> list[Patch]:
    def pages_of_largest(self: Admission, settled: list[Req]) -> int:
        del self, settled
        return 0

    return [(Admission, "_pages_of_largest", pages_of_largest)]


@_mistake("room", "requests that are known to end soon get no room to grow")
def _no_growth() -> list[Patch]:
    def tokens(self: ExpectedGrowth) -> float:
        del self
        return 0.0

    return [(ExpectedGrowth, "tokens", property(tokens))]


@_mistake("room", "cached pages that arriving requests hold count as room")
def _cached_are_room() -> list[Patch]:
    def pages_held_with(self: TransferQueue, req: Req) -> int:
        del req
        return self.memory.pool.count(PageState.ARRIVING)

    return [(TransferQueue, "pages_held_with", pages_held_with)]

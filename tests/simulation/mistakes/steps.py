"""Mistakes in the steps of a decode worker, what each carries and whom: see `mutations`."""

from __future__ import annotations

from decode import output_buffer
from decode.lifecycle import DecodeEvent
from decode.running_batch import RunningBatch
from decode.transfer_queue import TransferQueue, Transferred
from shared.batch.req import Req
from shared.batch.schedule_batch import PageGrant, SlotJoin
from shared.kv.page_pool import PageState
from shared.wire.baton import Baton
from shared.wire.messages import Row
from shared.wire.sampled import TokenLogprobs
from tests.simulation.mistakes.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("steps", "the step after the first carries the join, too, so a token is computed twice")
def _joined_twice() -> list[Patch]:
    def joins(self: RunningBatch) -> tuple[SlotJoin, ...]:
        starting = [req for req in self._starting if req.slot is not None]
        self._starting = [req for req in starting if req.launched_len == req.kv_len]
        return tuple(req.join(last_token=req.token_ids[-1]) for req in starting)

    return [(RunningBatch, "_joins", joins)]


@_mistake("steps", "a request joins with the token before its last")
def _token_before() -> list[Patch]:
    def joins(self: RunningBatch) -> tuple[SlotJoin, ...]:
        starting, self._starting = self._starting, []
        return tuple(req.join(last_token=req.token_ids[-2]) for req in starting if req.slot is not None)

    return [(RunningBatch, "_joins", joins)]


@_mistake("steps", "a request joins when its fetch starts")
def _before_it_landed() -> list[Patch]:
    real = TransferQueue.start

    def start(self: TransferQueue, req: Req, baton: Baton) -> Transferred | None:
        arrived = real(self, req, baton)
        if arrived is None:
            fetch_id = self._next_fetch_id - 1
            self._remove(fetch_id)
            self._quarantined[fetch_id] = []
            self.memory.pool.move(req.owned, PageState.ARRIVING, PageState.OWNED)
            arrived = self._arrive(Transferred(req), DecodeEvent.LANDED)
        return arrived

    return [(TransferQueue, "start", start)]


@_mistake("steps", "a row without a page runs all the same")
def _without_page() -> list[Patch]:
    real = RunningBatch._grant_pages

    def grant_pages(self: RunningBatch, growing: list[Req]) -> list[PageGrant]:
        grants = real(self, growing)
        for req in growing:
            req.launched_max = max(req.launched_max, req.launched_len + 1)
        return grants

    return [(RunningBatch, "_grant_pages", grant_pages)]


@_mistake("steps", "a page is looked for one step late")
def _page_late() -> list[Patch]:
    real = RunningBatch._look_ahead

    def look_ahead(self: RunningBatch, req: Req) -> None:
        real(self, req)
        if req.launched_max < req.final_kv_len:
            req.launched_max += 1

    return [(RunningBatch, "_look_ahead", look_ahead)]


@_mistake("steps", "a flush forgets all but the last token of a request")
def _last_token_only() -> list[Patch]:
    def row(
        rid: str, attempt: int, index: int, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> Row:
        return Row(rid, attempt, index + len(token_ids) - 1, token_ids[-1:], logprobs[-1:])

    return [(output_buffer, "Row", row)]

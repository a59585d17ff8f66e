"""The rows of prompts in a step, as the device takes them, and what routers are told of prompts.

    PrefillAdder ─► extends ─► prompt_rows ─► joins │ grants │ rows      the first row of a request carries its join

Nothing here plans, allocates or changes a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from shared.batch.req import Req
from shared.batch.schedule_batch import ExtendRow, PageGrant, SlotJoin
from shared.kv.kv_memory import KvMemory
from shared.scheduling.prefill_adder import Extend
from shared.wire.baton import Baton
from shared.wire.messages import SCORES_MAX, FinishReason, Prefilled, Scored
from shared.wire.sampled import TokenLogprobs


class PromptRows(NamedTuple):
    """What a `ScheduleBatch` says of prompts."""

    joins: tuple[SlotJoin, ...]
    grants: tuple[PageGrant, ...]  # of requests that have joined before
    rows: tuple[ExtendRow, ...]


def prompt_rows(extends: Iterable[Extend], memory: KvMemory) -> PromptRows:
    """The rows of requests that are in slots and have their pages.

    A grant brings the pages behind those of all tokens before its row: a request got none between its rows.
    """
    joins, grants, rows = list[SlotJoin](), list[PageGrant](), list[ExtendRow]()
    for req, start, end, last in ((each.req, each.start, each.end, each.last) for each in extends):
        assert req.slot is not None
        if start == req.cached_len:
            joins.append(req.join())
        else:
            grants.append(PageGrant(req.slot, tuple(req.pages[memory.pages_for(start) :])))
        rows.append(ExtendRow(req.slot, req.token_ids[start:end], start, last, req.scores(start, end)))
    return PromptRows(tuple(joins), tuple(grants), tuple(rows))


def scored_messages(req: Req, index: int, logprobs: Sequence[TokenLogprobs]) -> Iterator[Scored]:
    """What tells the router the logprobs of the prompt's tokens from `index` on, in order."""
    for start in range(0, len(logprobs), SCORES_MAX):
        some = tuple(logprobs[start : start + SCORES_MAX])
        yield Scored(req.rid, req.attempt, index + start, some)


def prefilled(
    req: Req,
    token_id: int,
    logprobs: TokenLogprobs | None,
    finish: FinishReason | None,
    now: float,
    baton: Baton | None = None,
) -> Prefilled:
    """What tells the router the first token of an attempt, which is the last of `req.token_ids`. `now` in seconds."""
    return Prefilled(
        rid=req.rid,
        attempt=req.attempt,
        index=req.output_len - 1,
        token_ids=(token_id,),
        baton=baton,
        finish=finish,
        cached_tokens=req.cached_len,
        queue_seconds=req.started_at - req.arrived_at,
        compute_seconds=now - req.started_at,
        logprobs=() if logprobs is None else (logprobs,),
    )

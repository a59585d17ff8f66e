"""Mistakes in which logprobs come with which tokens."""

from __future__ import annotations

from typing import Any

from router.core.effects import PromptScored
from shared.wire.sampled import Logprobs, Sampled, TokenLogprobs
from tests.simulation.mistakes.mutation import Instead, Mistakes
from tests.simulation.mistakes.roles import get


def _sliced_at_the_end(
    generate: Any, table: Any, live: Any, token_ids: Any, logprobs: Any, now: float
) -> None:
    kept = live.output and logprobs[::-1]
    generate(table, live, token_ids, tuple(kept) if kept else logprobs, now)


def _rows_swapped(settle: Any, decode: Any, batch: Any, sampled: Any, now: float) -> None:
    given = dict(zip(sampled.logprobs, [*sampled.logprobs.values()][::-1], strict=True))
    settle(decode, batch, Sampled(sampled.token_ids, given, sampled.scored, sampled.failed), now)


def _sent_again() -> Instead:
    told: dict[str, Logprobs] = {}

    def row(real: Any, rid: str, attempt: int, index: int, token_ids: Any, logprobs: Logprobs) -> Any:
        if logprobs:
            told[rid] = (*told.get(rid, ()), *logprobs)
            logprobs = told[rid][: len(token_ids)]
        return real(rid, attempt, index, token_ids, logprobs)

    return {"a row is made": row}


def _chunk_left_out(tell: Any, req: Any, index: int, logprobs: Any) -> Any:
    at = 1 if index > 1 else 0
    return tell(req, index + at, logprobs[at:])


def _scored_in_place(scores: Any, req: Any, start: int, end: int) -> Any:
    return req.token_ids[start : start + len(scores(req, start, end))]


def _told_again(score: Any, table: Any, live: Any, logprobs: Logprobs) -> None:
    if live.attempt > 1:
        get(table, "effects of requests").append(PromptScored(live.rid, logprobs[:1]))
    score(table, live, logprobs)


MISTAKES: dict[str, Mistakes] = {
    "logprobs": {
        "the first token's come from nowhere": {
            "a prompt is handed over": lambda hand_over, prefill, req, token_id, logprobs, now: hand_over(
                prefill, req, token_id, logprobs and TokenLogprobs(0.0), now
            )
        },
        "tokens that were told twice keep the logprobs of the first ones": {
            "tokens are told": _sliced_at_the_end
        },
        "rows of a step swap theirs": {"a step is settled": _rows_swapped},
        "they are sent again with the next tokens": _sent_again,
        "a cached prefix is not scored": {
            "how much of a prompt may come from the cache": lambda _, req: len(req.token_ids) - 1
        },
        "the first score of each chunk is left out": {"scores are told": _chunk_left_out},
        "a chunk is scored by the tokens it holds, not by those behind them": {
            "tokens by which a chunk is scored": _scored_in_place
        },
        "another attempt tells again what the first has told": {"a score is told": _told_again},
    },
}

"""Mistakes in which logprobs come with which tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from decode import output_buffer
from decode.scheduler import DecodeScheduler
from prefill.scheduler import PrefillScheduler
from router.core.effects import PromptScored
from router.core.requests.live_request import LiveRequest
from router.core.requests.request_table import RequestTable
from shared.batch.req import Req
from shared.batch.schedule_batch import ScheduleBatch
from shared.wire.messages import Row
from shared.wire.sampled import Logprobs, Sampled, TokenLogprobs
from tests.simulation.mistakes.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("logprobs", "the first token's come from nowhere")
def _first_made_up() -> list[Patch]:
    def hand_over(
        self: PrefillScheduler, req: Req, token_id: int, logprobs: TokenLogprobs | None, now: float
    ) -> None:
        real(self, req, token_id, logprobs and TokenLogprobs(0.0), now)

    real = PrefillScheduler._hand_over
    return [(PrefillScheduler, "_hand_over", hand_over)]


@_mistake("logprobs", "tokens that were told twice keep the logprobs of the first ones")
def _sliced_at_the_end() -> list[Patch]:
    def generate(
        self: RequestTable, live: LiveRequest, token_ids: tuple[int, ...], logprobs: Logprobs, now: float
    ) -> None:
        kept = live.output and logprobs[::-1]
        real(self, live, token_ids, tuple(kept) if kept else logprobs, now)

    real = RequestTable.generate
    return [(RequestTable, "generate", generate)]


@_mistake("logprobs", "rows of a step swap theirs")
def _rows_swapped() -> list[Patch]:
    def settle(self: DecodeScheduler, batch: ScheduleBatch, sampled: Sampled, now: float) -> None:
        given: Mapping[int, TokenLogprobs] = dict(
            zip(sampled.logprobs, [*sampled.logprobs.values()][::-1], strict=True)
        )
        real(self, batch, Sampled(sampled.token_ids, given, sampled.scored, sampled.failed), now)

    real = DecodeScheduler.settle
    return [(DecodeScheduler, "settle", settle)]


@_mistake("logprobs", "they are sent again with the next tokens")
def _sent_again() -> list[Patch]:
    told: dict[str, Logprobs] = {}

    def row(rid: str, attempt: int, index: int, token_ids: tuple[int, ...], logprobs: Logprobs) -> Row:
        if logprobs:
            told[rid] = (*told.get(rid, ()), *logprobs)
            logprobs = told[rid][: len(token_ids)]
        return Row(rid, attempt, index, token_ids, logprobs)

    return [(output_buffer, "Row", row)]


@_mistake("logprobs", "a cached prefix is not scored")
def _cached_not_scored() -> list[Patch]:
    def reusable_len(self: Req) -> int:
        return len(self.token_ids) - 1

    return [(Req, "reusable_len", property(reusable_len))]


@_mistake("logprobs", "the first score of each chunk is left out")
def _chunk_left_out() -> list[Patch]:
    def tell_scores(self: PrefillScheduler, req: Req, index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        at = 1 if index > 1 else 0
        real(self, req, index + at, logprobs[at:])

    real = PrefillScheduler._tell_scores
    return [(PrefillScheduler, "_tell_scores", tell_scores)]


@_mistake("logprobs", "a chunk is scored by the tokens it holds, not by those behind them")
def _scored_in_place() -> list[Patch]:
    def scores(self: Req, start: int, end: int) -> list[int]:
        told = real(self, start, end)
        return self.token_ids[start : start + len(told)]

    real = Req.scores
    return [(Req, "scores", scores)]


@_mistake("logprobs", "another attempt tells again what the first has told")
def _told_again() -> list[Patch]:
    def score(self: RequestTable, live: LiveRequest, logprobs: Logprobs) -> None:
        if live.attempt > 1:
            self._effects.append(PromptScored(live.rid, logprobs[:1]))
        real(self, live, logprobs)

    real = RequestTable.score
    return [(RequestTable, "score", score)]

"""Mistakes in what a request's bad words are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shared.batch.schedule_batch import SlotJoin
from shared.engine.sampling.token_masks import TokenMasks
from shared.wire.sampling_params import SamplingParams
from tests.simulation.mistakes.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("bad words", "bad words are looked for in the prompt, too")
def _in_the_prompt() -> list[Patch]:
    def join(self: TokenMasks, join: SlotJoin) -> None:
        real(self, replace(join, prompt_len=0))

    real = TokenMasks.join
    return [(TokenMasks, "join", join)]


@_mistake("bad words", "a request that goes on has forgotten the end of its output")
def _forgotten() -> list[Patch]:
    def join(self: TokenMasks, join: SlotJoin) -> None:
        real(self, replace(join, token_ids=join.token_ids[: join.prompt_len]))

    real = TokenMasks.join
    return [(TokenMasks, "join", join)]


@_mistake("bad words", "what is chosen is not added to the output that bad words look at")
def _not_taken() -> list[Patch]:
    def take(self: TokenMasks, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        del self, slots, token_ids

    return [(TokenMasks, "take", take)]


@_mistake("bad words", "a request with bad words joins without its tokens")
def _without_history() -> list[Patch]:
    return [(SamplingParams, "needs_history", property(lambda self: self.penalized))]

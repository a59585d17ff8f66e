"""Mistakes in what a request's grammar is told of its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shared.batch.req import Req
from shared.batch.schedule_batch import SlotJoin
from shared.engine.sampling.constraints import Constraints
from shared.links.events import LinkEvent, Received
from shared.worker.grammar_gate import GrammarGate
from tests.simulation.mistakes.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("grammars", "a grammar is rebuilt from the prompt, too")
def _from_the_prompt() -> list[Patch]:
    def join(self: Constraints, join: SlotJoin) -> None:
        real(self, replace(join, prompt_len=0))

    real = Constraints.join
    return [(Constraints, "join", join)]


@_mistake("grammars", "a grammar is not rebuilt from the output where a request goes on")
def _not_rebuilt() -> list[Patch]:
    def join(self: Constraints, join: SlotJoin) -> None:
        real(self, replace(join, token_ids=join.token_ids[: join.prompt_len]))

    real = Constraints.join
    return [(Constraints, "join", join)]


@_mistake("grammars", "a grammar takes each token twice")
def _twice() -> list[Patch]:
    def take(self: Constraints, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        real(self, slots, token_ids)
        real(self, slots, token_ids)

    real = Constraints.take
    return [(Constraints, "take", take)]


@_mistake("grammars", "the last token of an output is missing where a request goes on")
def _one_short() -> list[Patch]:
    def join(self: Req, last_token: int | None = None) -> SlotJoin:
        joined = real(self, last_token)
        return replace(joined, token_ids=joined.token_ids[:-1]) if self.output_len else joined

    real = Req.join
    return [(Req, "join", join)]


@_mistake("grammars", "a request whose grammar was waited for is forgotten")
def _forgotten() -> list[Patch]:
    def released(self: GrammarGate) -> Sequence[LinkEvent]:
        return [event for event in real(self) if not isinstance(event, Received)]

    real = GrammarGate._released
    return [(GrammarGate, "_released", released)]

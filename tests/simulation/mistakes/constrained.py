"""Mistakes in what bad words and grammars are told of an output, and in who gets masks in time: see `mutations`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from shared.links.events import Received
from tests.simulation.mistakes.mutation import Mistakes, nothing
from tests.simulation.mistakes.roles import get


def _from_the_prompt(real: Any, rules: Any, join: Any) -> None:
    real(rules, replace(join, prompt_len=0))


def _output_forgotten(real: Any, rules: Any, join: Any) -> None:
    real(rules, replace(join, token_ids=join.token_ids[: join.prompt_len]))


def _twice(take: Any, grammars: Any, slots: Any, token_ids: Any) -> None:
    take(grammars, slots, token_ids)
    take(grammars, slots, token_ids)


def _one_short(join: Any, req: Any, last_token: int | None = None) -> Any:
    joined = join(req, last_token)
    return replace(joined, token_ids=joined.token_ids[:-1]) if req.output_len else joined


def _late_tokens_forgotten(mask: Any, matcher: Any, seconds: float = math.inf) -> Any:
    bits = mask(matcher, seconds)
    if bits is None:
        get(matcher, "tokens a matcher has yet to take").clear()
    return bits


MISTAKES: dict[str, Mistakes] = {
    "bad words": {
        "bad words are looked for in the prompt, too": {
            "bad words meet a request that joins": _from_the_prompt
        },
        "a request that goes on has forgotten the end of its output": {
            "bad words meet a request that joins": _output_forgotten
        },
        "what is chosen is not added to the output that bad words look at": {
            "bad words see what was chosen": nothing
        },
        "a request with bad words joins without its tokens": {
            "a request needs its tokens to join": lambda _, params: params.penalized
        },
    },
    "grammars": {
        "a grammar is rebuilt from the prompt, too": {
            "a grammar meets a request that joins": _from_the_prompt
        },
        "a grammar is not rebuilt from the output where a request goes on": {
            "a grammar meets a request that joins": _output_forgotten
        },
        "a grammar takes each token twice": {"a grammar takes what was chosen": _twice},
        "the last token of an output is missing where a request goes on": {
            "a request joins a batch": _one_short
        },
        "a request whose grammar was waited for is forgotten": {
            "requests whose grammar is there go on": lambda released, gate: [
                event for event in released(gate) if not isinstance(event, Received)
            ]
        },
    },
    "masks": {
        "a row that sits a step out takes an unmasked token": {
            "a step is settled": lambda settle, decode, batch, sampled, now: settle(
                decode, batch, replace(sampled, sat_out=()), now
            )
        },
        "a row that sits a step out loses its token": {
            "rows of a step are settled": lambda settle, running, step, _sat_out=(): settle(running, step)
        },
        "a matcher forgets the tokens that it had no time for": {
            "a mask is computed in time": _late_tokens_forgotten
        },
        "the rows in front have their masks first, in every step": {
            "a row's turn for its mask ends": nothing
        },
        "what a mask took beyond the budget is nobody's": {"masks are paid for": nothing},
        "masks take the time of the tenant that had the slot before": {
            "a row with masks joins": lambda join, budget, slot, tenant: join(
                budget, slot, get(budget, "tenants of slots").get(slot, tenant)
            )
        },
    },
}

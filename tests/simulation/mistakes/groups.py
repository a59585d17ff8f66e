"""Mistakes about requests of one prompt: see `mutations`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from tests.simulation.mistakes.mutation import Mistakes, gives
from tests.simulation.mistakes.roles import get


def _with_prompt_logprobs(made: Any, asked: int) -> Any:
    return replace(made, params=msgspec.structs.replace(made.params, prompt_logprobs=asked))


def _orphaned(_: Any, group: Any, live: Any) -> bool:
    computing = get(group, "the choice that computes the prompt")
    return group.source is None and computing is not None and computing is not live


MISTAKES: dict[str, Mistakes] = {
    "groups": {
        "a sibling has the seed of the first": {
            "another choice of a request is made": lambda _, request, rid, _number, group: replace(
                request, rid=rid, sampling_group=group
            )
        },
        "each sibling has the prompt scored": {
            "another choice of a request is made": lambda choice, request, *rest: _with_prompt_logprobs(
                choice(request, *rest), request.params.prompt_logprobs
            )
        },
        "no sibling has the prompt scored": {
            "another choice of a request is made": lambda choice, *arguments: _with_prompt_logprobs(
                choice(*arguments), -1
            )
        },
        "siblings compute the prompt side by side": {"a choice waits for the prompt": gives(False)},
        "siblings go to any prefill worker": {"the worker that has the prompt": gives(None)},
        "siblings wait for a first one that has ended": {"a choice waits for the prompt": _orphaned},
        "each sibling is charged for the prompt": {
            "tokens a request is charged for": lambda _, request: len(request.token_ids)
        },
    },
}

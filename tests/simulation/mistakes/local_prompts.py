"""Mistakes in prompts that decode workers compute: see `mutations`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from decode.lifecycle import DecodeState
from tests.simulation.mistakes.mutation import Instead, Mistakes, gives
from tests.simulation.mistakes.roles import get


def _prompts_first(settle: Any, prompts: Any, batch: Any, seconds: float) -> list[Any]:
    """The tokens of prompts are taken from the front of a step's, where those of streams are."""
    before = len(batch.decode_slots)
    return [
        each if each.row is None else replace(each, row=each.row - before)
        for each in settle(prompts, batch, seconds)
    ]


def _keep_pages_of_prompts(release: Any, endings: Any, req: Any) -> None:
    if req.state is DecodeState.EXTENDING:
        endings.prompts.leave(req)
    else:
        release(endings, req)


def _never_back() -> Instead:
    """Once there was no prefill worker, there is none any more."""
    gone = set[Any]()

    def reason(real: Any, parts: Any, live: Any) -> Any:
        why = real(parts, live)
        if why == "no_prefill":
            gone.add(parts)
        return "no_prefill" if parts in gone and get(parts, "some decode worker computes")(live) else why

    return {"why decode computes a prompt": reason}


MISTAKES: dict[str, Mistakes] = {
    "local_prompts": {
        "a prompt's first token is that of a stream beside it": {
            "prompts of a step are settled": _prompts_first
        },
        "a prompt that leaves decode keeps its pages": {
            "what a request holds is released": _keep_pages_of_prompts
        },
        "a prompt is sent to a decode worker that does not know the command": {
            "a decode worker serves whole requests": lambda _, fleet, worker: bool(
                fleet and worker.hello.role == "decode"
            )
        },
        "decode computes prompts that prefill workers would take": {
            "why decode computes a prompt": lambda _, parts, live: (
                "no_prefill" if get(parts, "some decode worker computes")(live) else None
            )
        },
        "a router does not hear that prefill is back": _never_back,
        "no decode worker has a turn for a prompt": {"a decode worker has a turn": gives(False)},
    },
}

"""Mistakes in which prompts start, and in what a prompt in chunks leaves to short ones: see `mutations`."""

from __future__ import annotations

from typing import Any

from tests.simulation.mistakes.mutation import Mistakes, gives
from tests.simulation.mistakes.roles import get, put


class _PagelessMemory:
    """A memory that gives no pages."""

    def __init__(self, memory: Any):
        self.real = memory
        self.allocate = gives([])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def _no_pages(fill: Any, adder: Any) -> Any:
    put(adder, "the memory of prompts", _PagelessMemory(get(adder, "the memory of prompts")))
    return fill(adder)


def _others_passed(made: Any, prefill: Any, *arguments: Any, **named: Any) -> None:
    made(prefill, *arguments, **named)
    most = get(prefill, "the most that short prompts may take")
    put(prefill, "the most that short prompts may take", min(most, prefill.memory.page_size))


def _same_key_only(_: Any, arrived: Any, cache: Any, running: Any) -> list[Any]:
    del cache
    keys = {req.extra_key for req in running}
    return [req for req in arrived if req.extra_key in keys]


def _as_much_is_too_much(may_start: Any, prefill: Any, req: Any, held: Any) -> bool:
    pages_leased = get(prefill, "settings of prefill").lease_fraction * prefill.memory.pool.total
    return prefill.leases.pages < pages_leased and bool(may_start(prefill, req, held))


MISTAKES: dict[str, Mistakes] = {
    "prefill": {
        "routing-key keeps only the requests whose key runs": {
            "requests are ordered by routing key": _same_key_only
        },
        "no prompt starts while leases hold as much as they may": {
            "a prompt may start": _as_much_is_too_much
        },
        "short prompts take all but a page of a chunk's steps, whatever their share": {
            "what short prompts may take beside a chunk": lambda _, prefill: get(
                prefill, "the most that short prompts may take"
            )
        },
        "a chunk leaves nothing to short prompts": {"what short prompts may take beside a chunk": gives(0.0)},
        "beside a chunk short prompts pass others that could join it, too": {
            "a prefill scheduler is made": _others_passed
        },
        "a chunk takes back what short prompts left without pages for it": {
            "a prompt fills the rest of a step": _no_pages
        },
    },
}

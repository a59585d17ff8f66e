"""Mistakes in what a prompt in chunks leaves to short ones: see `mutations`."""

from __future__ import annotations

from typing import Any

from prefill.scheduler import PrefillScheduler
from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.scheduling.prefill_adder import PrefillAdder
from tests.simulation.mistakes.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("prefill", "short prompts take all but a page of a chunk's steps, whatever their share")
def _no_share() -> list[Patch]:
    def short_tokens_now(self: PrefillScheduler) -> float:
        return self._short_tokens_max

    return [(PrefillScheduler, "_short_tokens_now", short_tokens_now)]


@_mistake("prefill", "a chunk leaves nothing to short prompts")
def _nothing_left() -> list[Patch]:
    def short_tokens_now(self: PrefillScheduler) -> float:
        del self
        return 0.0

    return [(PrefillScheduler, "_short_tokens_now", short_tokens_now)]


@_mistake("prefill", "beside a chunk short prompts pass others that could join it, too")
def _others_passed() -> list[Patch]:
    def with_less(self: PrefillScheduler, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **named)
        self._short_tokens_max = min(self._short_tokens_max, self.memory.page_size)

    real = PrefillScheduler.__init__
    return [(PrefillScheduler, "__init__", with_less)]


@_mistake("prefill", "a chunk takes back what short prompts left without pages for it")
def _no_pages() -> list[Patch]:
    def fill(self: PrefillAdder) -> int:
        def allocate(req: Req, count: int) -> list[int]:
            del req, count
            return []

        self._memory = _Without(self._memory, allocate)  # type: ignore[assignment]
        return real(self)

    real = PrefillAdder.fill
    return [(PrefillAdder, "fill", fill)]


class _Without:
    """A memory that gives no pages."""

    def __init__(self, memory: KvMemory, allocate: Any):
        self._memory = memory
        self.allocate = allocate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

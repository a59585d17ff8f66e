"""The prompts in slots, and the EXTEND steps made of them.

    start ─► chunked, chunked, … ─► running (its last row is in flight) ─► leave

A step is planned before the one in flight has settled. At most one request is chunked: cut at the end of a step, to go
on in the next one. It does not know why a request starts or leaves.
"""

from __future__ import annotations

from prefill.counters import PrefillCounters
from prefill.lifecycle import PrefillEvent, PrefillState
from shared.batch.req import Req
from shared.batch.schedule_batch import ForwardMode, ScheduleBatch
from shared.kv.kv_memory import KvMemory
from shared.primitives.errors import InvariantError
from shared.scheduling.prefill_adder import Extend
from shared.scheduling.prompt_rows import prompt_rows
from shared.scheduling.request_states import RequestStates
from shared.scheduling.slots import Slots


class PromptBatch:
    """Requests in slots by rid, in the order they started, and the rows of every step that has not settled."""

    def __init__(
        self,
        memory: KvMemory,
        states: RequestStates[PrefillState, PrefillEvent],
        counters: PrefillCounters,
        slots: int,
    ):
        self.chunked: Req | None = None  # the one of `running` that is CHUNKED
        self._memory = memory
        self._states = states
        self._counters = counters
        self._slots = Slots(slots)
        self._running: dict[str, Req] = {}
        self._planned: dict[int, list[Extend]] = {}  # steps launched and not settled

    def __len__(self) -> int:
        return len(self._running)

    @property
    def reqs(self) -> list[Req]:
        """The requests in slots."""
        return list(self._running.values())

    @property
    def free_slots(self) -> int:
        """Slots that can be taken."""
        return self._slots.free

    @property
    def ends_a_prompt(self) -> bool:
        """Whether a step in flight computes the last tokens of a prompt."""
        return any(extend.last for extends in self._planned.values() for extend in extends)

    def find(self, rid: str) -> Req | None:
        """The request in a slot with this id."""
        return self._running.get(rid)

    def start(self, req: Req, now: float) -> None:
        """Give the request, whose first row is planned, a free slot."""
        self._slots.take(req)
        req.kv_len = req.launched_len = req.cached_len
        req.started_at = now
        self._running[req.rid] = req
        self._counters.cached_tokens += req.cached_len

    def leave(self, req: Req) -> None:
        """Take the request out of its slot. It may still have a row in the step in flight."""
        del self._running[req.rid]
        self._slots.give_back(req)
        if self.chunked is req:
            self.chunked = None

    def extend(self, extends: list[Extend]) -> ScheduleBatch:
        """The step that computes these rows."""
        joins, grants, rows = prompt_rows(extends, self._memory)
        for extend in extends:
            extend.req.launched_len = extend.end
            self._states.advance(
                extend.req, PrefillEvent.LAST_PLANNED if extend.last else PrefillEvent.CHUNK_PLANNED
            )
        self.chunked = next((extend.req for extend in extends if not extend.last), None)
        self._memory.launched_step += 1
        self._planned[self._memory.launched_step] = extends
        self._counters.extend_steps += 1
        self._counters.extend_tokens += sum(extend.end - extend.start for extend in extends)
        self._counters.chunks += sum(not extend.last for extend in extends)
        return ScheduleBatch(self._memory.launched_step, ForwardMode.EXTEND, joins, grants, rows)

    def settle(self, step: int) -> list[Extend]:
        """The rows of a step that has settled, in their order."""
        return self._planned.pop(step)

    def check(self) -> None:
        """Prove that every slot is free or a request's; raises `InvariantError`."""
        if len(self._running) != self._slots.used:
            raise InvariantError(f"{len(self._running)} requests, {self._slots.free} slots free")

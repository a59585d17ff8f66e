"""Retracted requests that host memory had no room for are computed again here, beside the streams that decode.

    start ─► extending: a chunk in each step, as many tokens as its time has room for ─► all computed: it joins

A request has the pages of all its tokens when it starts, so it never waits for a page. Its rows sample nothing: the
tokens are known. Then it joins as one whose pages were copied back. Requests are computed in the order in which they
started, and rows that decode get their next token within `itl_target_seconds`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decode.counters import DecodeCounters
from decode.lifecycle import DecodeState
from shared.batch.req import Req
from shared.batch.schedule_batch import ExtendRow, ScheduleBatch, SlotJoin
from shared.kv.kv_memory import KvMemory
from shared.scheduling.chunk_budget import chunk_tokens
from shared.scheduling.prefill_adder import Extend
from shared.scheduling.step_cost import StepCost

# How long a step may take: the target, or so many times a step that only decodes, where those take longer …
DECODE_STEPS = 1.25
# … and where nobody decodes so many times the target, for somebody may join meanwhile.
ALONE = 4


@dataclass(slots=True)
class Recomputation:
    """The requests that are being computed again, and their rows in the steps that have not settled."""

    memory: KvMemory
    counters: DecodeCounters
    tokens_max: int  # of a step; 0: this worker computes nothing again
    itl_target_seconds: float
    cost: StepCost = field(default_factory=StepCost)
    _seconds: dict[Req, float] = field(
        default_factory=dict
    )  # of the device for each, in the order of their start
    # By step, with the seconds that it may take.
    _planned: dict[int, tuple[list[Extend], float]] = field(default_factory=dict)
    _tried: int = 0  # tokens that a step may take whatever the fit says: half as many took half its time

    @property
    def enabled(self) -> bool:
        """Whether this worker computes tokens of prompts at all."""
        return self.tokens_max > 0

    @property
    def extending(self) -> list[Req]:
        """The requests that are being computed again, in the order in which they started."""
        return list(self._seconds)

    def start(self, req: Req) -> None:
        """Compute the request from its first token on that is not cached; it has the pages of all its tokens."""
        req.kv_len = req.launched_len = req.cached_len
        self._seconds[req] = 0.0
        self.counters.recomputed += 1

    def leave(self, req: Req) -> None:
        """Stop: the request has ended. It may still have a row in the step in flight."""
        del self._seconds[req]

    def plan(self, step: int, decode_rows: int) -> tuple[tuple[SlotJoin, ...], tuple[ExtendRow, ...]]:
        """What this step computes of them beside so many rows that decode: the joins and the rows."""
        if not self._seconds:
            return (), ()
        extends = self._chunks(decode_rows)
        joins, rows = list[SlotJoin](), list[ExtendRow]()
        for req, start, end in ((each.req, each.start, each.end) for each in extends):
            assert req.slot is not None
            if start == req.cached_len:
                joins.append(req.join())
            rows.append(ExtendRow(req.slot, req.token_ids[start:end], start, samples=False))
            req.launched_len = end
        if extends:
            self._planned[step] = extends, self._bound_seconds(decode_rows)
            self.counters.extend_tokens += sum(each.end - each.start for each in extends)
        return tuple(joins), tuple(rows)

    def settle(self, batch: ScheduleBatch, seconds: float) -> list[tuple[Req, float]]:
        """Learn what the step cost; returns those that it has completed, each with the device's seconds for it."""
        (extends, bound), rows = self._planned.pop(batch.step, ([], 0.0)), len(batch.decode_slots)
        if not extends:
            self.cost.observe_decode(rows, seconds)
            return []
        self.cost.observe_extend(rows, [(each.start, each.end - each.start) for each in extends], seconds)
        here = [each for each in extends if each.req.state is DecodeState.EXTENDING]
        beyond = max(0.0, seconds - self.cost.decode_seconds(rows))
        tokens = sum(each.end - each.start for each in extends)
        room = bound - self.cost.decode_seconds(rows)
        self._tried = 2 * tokens if seconds > 0 and beyond <= room / 2 else 0
        for each in here:
            each.req.kv_len = each.end
            self._seconds[each.req] += beyond * (each.end - each.start) / tokens
        done = [(each.req, self._seconds.pop(each.req)) for each in here if each.last]
        for req, _ in done:
            self.memory.commit_and_dedupe(req)  # the slot's next join names the pages anew
        return done

    def _chunks(self, decode_rows: int) -> list[Extend]:
        """The next tokens of each in turn, until the step's tokens or its time are used up."""
        bound, left = self._bound_seconds(decode_rows), self.tokens_max
        chunks = list[Extend]()
        for req in self._seconds:
            start, all_tokens = req.launched_len, len(req.token_ids) - 1
            if start == all_tokens:
                continue  # its last row is in flight
            count = chunk_tokens(
                self.cost,
                rows=decode_rows,
                position=start,
                bound_seconds=bound,
                page_size=self.memory.page_size,
                tokens_max=left,
            )
            end = min(start + max(count, self._tried_from(start, left)), all_tokens)
            chunks.append(Extend(req, start, end, last=end == all_tokens))
            if end < all_tokens or self.cost.extend is None:
                break
            left -= end - start
            bound -= self.cost.extend.seconds(start, end - start)
            if left < self.memory.page_size or bound <= self.cost.decode_seconds(decode_rows):
                break
        return chunks

    def _tried_from(self, start: int, left: int) -> int:
        """Tokens up to the end of a page; steps of one page alone do not tell what a pass costs and what a token."""
        page_size = self.memory.page_size
        return (start + min(self._tried, left)) // page_size * page_size - start

    def _bound_seconds(self, decode_rows: int) -> float:
        if not decode_rows:
            return ALONE * self.itl_target_seconds
        return max(self.itl_target_seconds, DECODE_STEPS * self.cost.decode_seconds(decode_rows))

"""The oracle for turns at a prefill worker: each start is judged, and each step that leaves one waiting.

- No request starts while a tenant that holds fewer tokens there waits; but beside a chunk short ones pass those that
  need chunks of their own.
- Of a tenant nobody starts before one that came earlier and has waited for `ageing_seconds`, with the same exceptions.
- Beside a chunk short requests take their share of its steps, no more and, if one is below its share, no less.
- Only requests below their tenant's share take the lease words that are kept for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefill.config import PrefillConfig
from prefill.scheduler import PrefillScheduler
from shared.batch.req import Req
from shared.batch.schedule_batch import ExtendRow, ScheduleBatch
from shared.kv.page_pool import PageState
from shared.scheduling.tenant_shares import share_of, tokens_by_tenant


@dataclass(frozen=True, slots=True)
class PromptStart:
    """When a request was started at a prefill worker, and how many of its tokens were not cached there."""

    at: float
    tokens: int


class JudgedPrefill(PrefillScheduler):
    """The core of a prefill worker. Each start is judged, and each step that leaves one below its share waiting."""

    def __init__(self, config: PrefillConfig, **rest: Any):
        super().__init__(config, **rest)
        self.judged: Counter[str] = Counter()
        self._words_below_share = config.leases_max - share_of(config.leases_max, config.tenant_share_max)
        self._capacity = config.lease_fraction * self.memory.pool.total * config.page_size
        self._ageing_seconds = config.ageing_seconds
        self._page_size, self._short_share = config.page_size, config.short_share
        self._step_tokens = max(min(config.max_prefill_tokens, config.chunked_prefill_size), config.page_size)
        self.prompt_starts: dict[str, PromptStart] = {}
        self.full_at: list[float] = []  # when a plan left no free page: it may have evicted some
        self._saved = 0.0  # input that chunks have left to short requests so far

    def _start(self, req: Req, now: float) -> None:
        held, beside_a_chunk = self._held(), self._one_is_cut()
        super()._start(req, now)
        self.prompt_starts[req.rid] = PromptStart(now, len(req.token_ids) - req.cached_len)
        waiting = self.waiting.reqs
        put_off = {each.tenant for each in waiting if each.sequence in self.waiting.put_off}
        passed = {each.tenant for each in waiting if held[each.tenant] < held[req.tenant]} - put_off
        if beside_a_chunk:
            long = {each.tenant for each in waiting if self._is_long(each)}
            self.judged["short before a long one"] += bool(long)
            passed -= long
        assert not passed, f"{req.rid} of {req.tenant} starts before {passed}, who hold less of {held}"
        self._judge_age(req, beside_a_chunk, now)
        words_left = self.leases.free - len(self.batch)
        if is_below_share(req, held, len(req.token_ids), self._capacity):
            self.judged["below its share into what is kept"] += words_left < self._words_below_share
            return
        self.judged["no more than a share"] += words_left == self._words_below_share
        assert words_left >= self._words_below_share, (
            f"{req.rid} starts and leaves {words_left} lease words; {self._words_below_share} are kept"
        )

    def _is_long(self, req: Req) -> bool:
        """Whether it needs chunks of its own."""
        return len(req.token_ids) - req.cached_len > self._step_tokens - self._page_size

    def _judge_age(self, req: Req, beside_a_chunk: bool, now: float) -> None:
        """Nobody of its tenant that came earlier has waited for long, and waits on."""
        passed = [
            each.rid
            for each in self.waiting.reqs
            if each.tenant == req.tenant
            and each.sequence < req.sequence
            and each.arrived_at <= now - self._ageing_seconds
            and each.sequence not in self.waiting.put_off
            and not (beside_a_chunk and self._is_long(each))
        ]
        assert not passed, f"{req.rid} starts before {passed}, which have waited for long"
        self.judged["one that has waited long goes first"] += (
            req.arrived_at <= now - self._ageing_seconds and any(self.waiting.reqs)
        )

    def plan(self, now: float) -> ScheduleBatch | None:
        batch = super().plan(now)
        if not self.memory.pool.free:
            self.full_at.append(now)
        rows = batch.extend if batch is not None else ()
        input_left, pages_kept = self._step_tokens - sum(len(row.token_ids) for row in rows), 0
        if self.batch.chunked is not None:
            if not rows:
                return batch  # the chunk lacks pages; nobody goes before it
            input_left = self._judge_chunk(rows, self.batch.chunked)
            pages_kept = self.memory.pages_missing(self.batch.chunked, len(self.batch.chunked.token_ids))
        if self.batch.free_slots and self.leases.free > len(self.batch):
            self._judge_waiting(input_left, pages_kept)
        return batch

    def _one_is_cut(self) -> bool:
        """Whether a request has pages for its chunks up to this step, not for its whole prompt."""
        return any(self.memory.pages_missing(req, len(req.token_ids)) for req in self.batch.reqs)

    def _judge_chunk(self, rows: Sequence[ExtendRow], chunked: Req) -> int:
        """The chunk keeps a page, and loses no more to short ones than was saved. Returns what they may still take."""
        page, tokens = self._page_size, [len(row.token_ids) for row in rows]
        place = [row.slot for row in rows].index(chunked.slot or 0)
        assert tokens[place] >= page, f"the chunk of {chunked.rid} has {tokens[place]} tokens of {tokens}"
        before, beside = sum(tokens[:place]), sum(tokens[place + 1 :])
        end = rows[place].start + self._step_tokens - before
        lost = end // page * page - (end - beside) // page * page
        most = self._step_tokens - page
        self._saved = min(self._saved + self._short_share * self._step_tokens, most) - lost
        assert self._saved >= 0, f"{beside} tokens beside the chunk of {chunked.rid}: {-self._saved} too many"
        self.judged["short beside a chunk"] += lost > 0
        return 0 if before else int(self._saved) // page * page

    def _judge_waiting(self, input_left: int, pages_kept: int) -> None:
        """There is a slot and a lease word: one below its share, the first in the order, lacks input or pages."""
        waiting = self.waiting.reqs
        if not waiting or self.waiting.put_off or self.memory.pool.count(PageState.RETIRING):
            return  # one that was put off stands elsewhere in the order; pages that retire are soon free
        held = self._held()
        least = min(held[req.tenant] for req in waiting)
        firsts = [req for req in waiting if held[req.tenant] == least]
        req, size = firsts[0], len(firsts[0].token_ids)
        enough_pages = self.memory.pages_for(size) <= self.memory.available_pages - pages_kept
        if len(firsts) == 1 and enough_pages and is_below_share(req, held, size, self._capacity):
            self.judged["below its share waits for input"] += 1
            assert size > input_left, f"{req.rid} is below its share and waits beside a step with room for it"

    def _held(self) -> Counter[str]:
        return tokens_by_tenant([*self.batch.reqs, *self.leases.reqs])


def is_below_share(req: Req, held: Counter[str], size: int, capacity: float) -> bool:
    """Whether its tenant, with it, holds fewer tokens than another one.

    With `size` for this request it must also stay within an even share of `capacity`, one share left over.
    """
    own = held[req.tenant]
    others = [tokens for tenant, tokens in held.items() if tenant != req.tenant]
    lighter = own + len(req.token_ids) < max(others, default=0)
    return lighter and own + size <= capacity / (len(others) + 2)

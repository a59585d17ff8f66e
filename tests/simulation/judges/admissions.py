"""The oracle for who comes into a decode worker: each admission, refusal, resume and chunk is judged as it happens.

- Only requests below their tenant's share take what is kept for them; those that resume do not.
- A request below its share is refused only where it finds no place at all.
- Pages that arrive leave the largest request what it can want until they have landed.
- A request that comes in leaves room for the next steps of all, once lengths of outputs are known.
- No prompt is begun while streams are retracted, but of a tenant below its share, and none is put back for nobody.
- Beside a prompt of several steps short ones take their share of its steps, no more and no less.
- No row misses a step for a page while the cache could give one.

Bounds of few places keep nothing (`share_of` rounds to whole places), so there a request below its share waits for the
next place that comes free, and only its turn is judged. Which request is below its share is computed here once more,
not asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from decode.admission import BACKFILL_MAX
from decode.config import DecodeConfig
from decode.intake import Intake
from decode.local_prompts import SHORT_SHARE
from shared.batch.req import Req
from shared.batch.schedule_batch import ExtendRow, ScheduleBatch
from shared.kv.page_pool import PageState
from shared.scheduling.tenant_shares import share_of, tokens_by_tenant
from shared.wire.baton import Baton
from tests.simulation.judges.foreseen import JudgedForeseen
from tests.simulation.judges.prompts import is_below_share
from tests.simulation.judges.turns import TurnJudge


@dataclass
class JudgedIntake(Intake):
    """How requests come into a decode worker. Those that find their pages cached, or are refused, are judged too."""

    judge: JudgedDecode = field(kw_only=True)

    def admit(self, req: Req, baton: Baton, now: float) -> None:
        judge, present = self.judge, self.judge.present()
        held, largest = tokens_by_tenant(present), judge.pages_of_largest()
        super().admit(req, baton, now)
        if req in self.transfer_queue.transferring:
            judge.judge_arriving(req, largest)
        judge.judge_admission(req, baton.kv_len, present, held)

    def start_prompt(self, req: Req) -> None:
        judge, present = self.judge, self.judge.present()
        held, retracted = tokens_by_tenant(present), self.retraction.active
        super().start_prompt(req)
        judge.judged["a prompt is begun at decode"] += req.slot is not None
        if req.slot is not None and retracted:
            assert judge.is_below_share(req, held), f"{req.rid} is begun while streams are retracted"
        judge.judge_admission(req, len(req.token_ids), present, held)


class JudgedDecode(JudgedForeseen):
    """The core of a decode worker. Each admission, refusal and resume is judged."""

    def __init__(self, config: DecodeConfig, *, pages: int, **rest: Any):
        super().__init__(config, pages=pages, **rest)
        slots, share = config.max_running_requests, config.tenant_share_max
        self._slots_below_share = slots - share_of(slots, share)
        self._retract_steps = config.retract_steps
        self._local_tokens_max = config.local_tokens_max
        self._saved = 0.0  # tokens that steps which cut a prompt have left to short ones so far
        self._pages_below_share = pages - share_of(pages, share)
        self._turns, self._planned_at = TurnJudge(config.turn_seconds, self.judged), 0.0

    def _build_intake(self) -> Intake:
        plain = super()._build_intake()
        return JudgedIntake(*(getattr(plain, each.name) for each in fields(plain)), judge=self)

    def present(self) -> list[Req]:
        """Those that have pages."""
        return [*self._with_pages, *self._transfer_queue.transferring]

    def _retract_until_fits(self) -> bool:
        before, running = self._prompts.served, bool(self._batch.running)
        present = self.present() if before else []
        retracted = super()._retract_until_fits()
        kept = self._prompts.served
        put_back = [req for req in before if req not in kept]
        self.judged["a prompt is put back for a stream"] += len(put_back)
        assert running or not put_back, f"{[req.rid for req in put_back]} are put back, and nobody runs"
        if retracted:
            there = [each for each in present if each not in put_back]
            held = {req: tokens_by_tenant(each for each in there if each is not req) for req in kept}
            above = [req.rid for req in kept if not self.is_below_share(req, held[req])]
            assert not above, f"streams are retracted beside the prompts {above}"
        return retracted

    def judge_admission(self, req: Req, tokens: int, present: list[Req], held: Counter[str]) -> None:
        """A request with so many tokens has come in beside those that were present, or was refused."""
        if req.slot is None:
            self._judge_refusal(req, tokens, held)
        elif self.is_below_share(req, held):
            self.judged["below its share into what is kept"] += (
                self._batch.free_slots < self._slots_below_share
            )
        elif present:
            self._judge_slots(req)
            self._judge_pages(req)
            self._judge_growth([*present, req])

    def on_copy(self, copy_id: int, now: float) -> None:
        super().on_copy(copy_id, now)
        self._turns.came_in_line(self.requests)

    def _back_up_settled(self) -> None:
        settling = list(self._retraction.settling)  # in the order in which they left
        super()._back_up_settled()
        self._turns.came_in_line(settling)

    def _take_turns(self) -> bool:
        running, now = [*self._batch.running.values()], self._planned_at
        self._turns.look(
            running, [req.state for req in self.requests if req not in self._prompts.served], now
        )
        any_left = super()._take_turns()
        leaving = [req for req in running if req not in self._batch.running.values()]
        pool = self.memory.pool
        if any_left:
            staying = [req for req in self.requests if req.slot is not None]
            self._turns.left(leaving, staying, self.memory, now)
        elif not (
            self._transfer_queue.in_flight
            or self._retraction.copying
            or self._retraction.settling
            or self._prompts.extending
            or self._batch.joining
            or self._migrations.settling
            or pool.count(PageState.RETIRING)
            or pool.count(PageState.QUARANTINED)
            or len(self.leases)
        ):
            self._turns.nobody_left(running, self._retraction, now)
        return any_left

    def plan(self, now: float) -> ScheduleBatch | None:
        self._planned_at = self._retraction.turns.now = now
        self._judge_resumed()
        without_page, there = self.counters.rows_without_page, self._prompts.extending
        batch = super().plan(now)
        if batch is not None and batch.extend:
            tokens, page = sum(len(row.token_ids) for row in batch.extend), self.memory.page_size
            assert tokens <= max(self._local_tokens_max, page), (
                f"step {batch.step} computes {tokens} tokens again"
            )
            self.judged["tokens are computed again beside streams"] += bool(batch.decode_slots)
            self._judge_short(batch.extend, there)
        if batch is not None and self.counters.rows_without_page > without_page:
            left = self.memory.cache.evictable
            self.judged["a row misses a step"] += 1
            assert not left, f"a row misses a step, but {left} pages could be evicted"
        return batch

    def _judge_short(self, rows: Sequence[ExtendRow], there: list[Req]) -> None:
        """Those that go past the first get no more than was saved for them, and each that fits what is left does."""
        computed = {row.slot: len(row.token_ids) for row in rows}
        waiting = self._judge_shared(rows)
        tokens = {
            each.req: each.end - each.req.launched_len + computed.get(each.req.slot or 0, 0)
            for each in self._prompts.in_order
            if each.req not in waiting
        }
        first = next(req for req, count in tokens.items() if count)
        slots = [row.slot for row in rows]
        place = slots.index(first.slot or 0) if first.slot in computed else len(slots)
        past = sum(computed[slot] for slot in slots[:place])
        self._saved -= past
        assert self._saved >= 0, f"{-self._saved} tokens too many go past {first.rid}"
        self.judged["short past a long one at decode"] += past > 0
        if place < len(slots):
            held_up = [
                req.rid
                for req, count in tokens.items()
                if req in there
                and req.slot not in computed
                and 0 < count < tokens[first]
                and count <= self._saved
            ]
            assert not held_up, f"{held_up} would fit the steps of {first.rid}"
        last = next(req for req in tokens if req.slot == slots[-1])
        if tokens[last] > computed[slots[-1]]:
            self._saved = min(self._saved + SHORT_SHARE * sum(computed.values()), self._local_tokens_max)

    def _judge_shared(self, rows: Sequence[ExtendRow]) -> set[Req]:
        """No prompt begins with a page that one before it computes; returns those that wait for one."""
        starts, waiting = {row.slot: row.start for row in rows}, set[Req]()
        in_order, page = self._prompts.in_order, self.memory.page_size
        for place, each in enumerate(in_order):
            req = each.req
            end = req.cached_len + page
            begins = starts.get(req.slot or 0) == req.cached_len
            if end > each.reusable_len or not (begins or req.launched_len == req.cached_len):
                continue
            before = [
                other.req.rid
                for other in in_order[:place]
                if other.end >= end
                and other.req.token_ids[:end] == req.token_ids[:end]
                and other.req.extra_key == req.extra_key
            ]
            assert not (begins and before), f"{req.rid} computes anew what {before} compute"
            if before:
                waiting.add(req)
        self.judged["a prompt waits for what another one computes"] += len(waiting)
        return waiting

    def _judge_resumed(self) -> None:
        """Resume requests, as `plan` does first, and judge what is left."""
        beside = self._with_pages
        slots_used = self._batch.slots_used
        self._resume_retracted()
        self._turns.resumed()
        resumed = self._batch.slots_used - slots_used
        if resumed and self._batch.slots_used > 1:
            self._judge_slots("a retracted request")
        if resumed and beside:
            self._judge_pages("a retracted request")

    def is_below_share(self, req: Req, held: Counter[str]) -> bool:
        """Whether the request's tenant holds so little of `held`, tokens by tenant."""
        return is_below_share(req, held, req.final_kv_len, self.memory.pool.total * self.memory.page_size)

    def _judge_slots(self, who: Req | str) -> None:
        left, kept = self._batch.free_slots, self._slots_below_share
        self.judged["no more than a share"] += left == kept
        assert left >= kept, f"{_name(who)} comes in and leaves {left} slots; {kept} are kept"

    def _judge_pages(self, who: Req | str) -> None:
        left, kept = self.memory.available_pages, self._pages_below_share
        assert left >= kept, f"{_name(who)} comes in and leaves {left} pages; {kept} are kept"

    def judge_arriving(self, req: Req, largest: int) -> None:
        """What arrives leaves the largest running request the pages that it can want until then."""
        pool = self.memory.pool
        arriving = {page for other in self._transfer_queue.transferring for page in other.pages}
        left = pool.total - pool.count(PageState.QUARANTINED) - len(arriving)
        self.judged["the largest keeps its pages"] += left < largest + len(arriving)
        assert left >= largest, f"{req.rid} arrives and leaves {left} pages; the largest can want {largest}"

    def pages_of_largest(self) -> int:
        """Pages that the largest request can hold when what arrives has landed or is given up."""
        steps = self._admission.steps_until_landed
        lengths = [min(other.final_kv_len, other.growing_from + steps) for other in self._with_pages]
        return max(map(self.memory.pages_for, lengths), default=0)

    def _judge_growth(self, present: list[Req]) -> None:
        """A new request leaves the pages that the next steps of all take, so that it causes no retraction at once."""
        if not self._admission.lengths.known:
            return
        tokens = sum(min(req.remaining_new_tokens, self._retract_steps) for req in present)
        left, wanted = self.memory.available_pages, self.memory.pages_for(tokens)
        self.judged["room by lengths seen"] += 1
        assert left >= wanted, f"{present[-1].rid} leaves {left} pages; the next steps of all take {wanted}"

    def _judge_refusal(self, req: Req, tokens: int, held: Counter[str]) -> None:
        """A request below its share finds no slot, or not the pages that it needs now beside the largest request's."""
        memory = self.memory
        if not self.is_below_share(req, held):
            return
        self.judged["below its share refused"] += 1
        if not self._batch.free_slots or self._retraction.backfilled >= BACKFILL_MAX:
            return
        pool = memory.pool
        usable = pool.total - pool.count(PageState.QUARANTINED)
        arriving = {page for other in self._transfer_queue.transferring for page in other.pages}
        room = min(memory.available_pages, usable - self.pages_of_largest() - len(arriving))
        if memory.pages_for(req.final_kv_len) <= usable and not pool.count(PageState.RETIRING):
            assert memory.pages_for(tokens) > room, (
                f"{req.rid} is below its share and refused for {room} pages"
            )


def _name(who: Req | str) -> str:
    return who if isinstance(who, str) else f"{who.rid} of {who.tenant}"

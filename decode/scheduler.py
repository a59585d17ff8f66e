"""Plans PREBUILT joins and DECODE steps, and settles what they sampled.

A request's way through a decode worker:

    Decode ─► arriving ─► joining ─► running ─► finished
              (arrivals)     ▲          └─► retracted ─┐
                             └─────────(retraction)────┘

Overlap: a step is planned before the one in flight has settled. So a row may run one step past its end (the extra
token is discarded), rows certain to end by length in the step in flight are left out, and whatever an ended request
held is retired, not freed. Landed requests always join; only new ones can be refused for lack of room.
"""

from __future__ import annotations

from collections import deque

from decode.arrivals import Arrivals, Arrived, NotArrived
from decode.config import DecodeConfig
from decode.counters import DecodeCounters
from decode.retraction import Retraction
from shared.audience import Audience
from shared.effects import Effect, Send
from shared.errors import InvariantError
from shared.kv_memory import KvMemory
from shared.link_events import LinkEvent, PeerDown, PeerUp, Received
from shared.messages import Cancel, Decode, Finished, Generated, Joined, Load, Refused, RefusalReason, Row
from shared.page_pool import PagePool, PageState
from shared.req import Req
from shared.schedule_batch import ForwardMode, PageGrant, ScheduleBatch, SlotJoin
from shared.schedule_policy import NewTokenRatio
from shared.transfer.protocol import FetchEvent


class DecodeScheduler:
    """The core of a decode worker."""

    def __init__(
        self,
        config: DecodeConfig,
        *,
        pages: int,
        host_pages: int,
        context_len: int,
        kv_format: str,
        eos_token_ids: frozenset[int],
    ):
        self._config = config
        self._context_len = context_len
        self._kv_format = kv_format
        self._eos_token_ids = eos_token_ids
        self.memory = KvMemory(pages, config.page_size, config.cache_policy)
        self.host = PagePool(host_pages)
        self.counters = DecodeCounters()
        self._effects: list[Effect] = []
        self._arrivals = Arrivals(self.memory, self.counters, self._effects)
        self._retraction = Retraction(
            self.memory, self.host, self.counters, self._effects, config.retractions_max
        )
        self._ratio = NewTokenRatio(
            init=config.init_new_token_ratio,
            conservativeness=config.schedule_conservativeness,
            min_factor=config.min_new_token_ratio_factor,
            decay_steps=config.new_token_ratio_decay_steps,
        )
        self._audience = Audience(config.load_seconds)
        self._number = 0
        self._reqs: dict[str, Req] = {}  # every live request, whatever its state
        self._joining: list[Req] = []
        self._running: dict[str, Req] = {}
        self._free_slots = deque(range(config.slots))
        self._planned: dict[int, list[Req]] = {}  # rows of the steps launched and not settled
        self._unsent: dict[str, list[Row]] = {}  # by router, until the next flush
        self._next_flush = 0.0
        self._readmitting = True  # False after a retraction, until enough of the pool is free
        self._dropped: list[Req] = []  # cancelled while their pages are being copied

    # ---- what comes in ----

    def on_link(self, event: LinkEvent, now: float) -> None:
        """A router came, went, or sent a command."""
        match event:
            case PeerUp(peer, _):
                self._audience.join(peer)
            case PeerDown(peer, _):
                self._audience.leave(peer)
                for req in [req for req in self._reqs.values() if req.router == peer]:
                    self._drop(req, now)
            case Received(peer, Decode() as command):
                self._intake(peer, command, now)
            case Received(_, Cancel(rid, attempt)):
                self._cancel(rid, attempt, now)
            case Received(peer, message):
                raise InvariantError(f"a decode worker got {type(message).__name__} from {peer}")

    def on_fetch(self, event: FetchEvent, now: float) -> None:
        """A fetch landed, went stale, failed or was proven to have ended."""
        match self._arrivals.on_fetch(event, now):
            case Arrived() as arrived:
                self._join(arrived)
            case NotArrived(req, stale, detail):
                self._refuse(req, "stale" if stale else "unreachable", detail)

    def on_copy(self, copy_id: int, now: float) -> None:
        """Pages are in host memory, or back from it."""
        restored = self._retraction.on_copy(copy_id)
        if restored is not None:
            self._joining.append(restored)
        dropped, self._dropped = self._dropped, []
        for req in dropped:
            self._drop(req, now)

    def tick(self, now: float) -> None:
        """Send the tokens that have waited long enough; tell the load."""
        if now >= self._next_flush:
            self._flush(now)
        if self._audience.due(now):
            self._effects.extend(self._audience.push(self._load(), now))

    def reclaim(self, completed_step: int) -> None:
        """The device has completed all steps up to `completed_step`."""
        self.memory.pool.reclaim(completed_step)

    # ---- steps ----

    def settles_first(self) -> bool:
        """A DECODE step needs nothing that only the CPU knows about the one before."""
        return False

    def plan(self, now: float) -> ScheduleBatch | None:
        """The next step: those whose KV has arrived join first, else everybody decodes one token."""
        del now
        self._resume()
        if self._joining:
            return self._prebuilt()
        return self._decode()

    def settle(self, batch: ScheduleBatch, token_ids: list[int], now: float) -> None:
        """Append what the step sampled, end the requests that are done, tell the routers."""
        finished: list[Send] = []
        for req, token_id in zip(self._planned.pop(batch.step), token_ids, strict=True):
            if self._reqs.get(req.rid) is not req:
                self.counters.extra_tokens += 1
                continue
            req.token_ids.append(token_id)
            req.kv_len += 1
            row = Row(req.rid, req.attempt, req.output_len - 1, (token_id,))
            self._unsent.setdefault(req.router, []).append(row)
            if reason := req.finish_reason(self._eos_token_ids):
                message = Finished(req.rid, req.attempt, req.output_len, reason, req.retractions)
                finished.append(Send(req.router, message))
                self._finish(req)
        if finished or now >= self._next_flush:
            self._flush(now)
        self._effects.extend(finished)
        self._send_back()

    # ---- what goes out ----

    def drain(self) -> list[Effect]:
        """What is to be done, in order."""
        effects = list(self._effects)
        self._effects.clear()
        return effects

    def next_deadline(self) -> float | None:
        """When unsent tokens have waited long enough."""
        return self._next_flush if self._unsent else None

    def awaits_transfer(self) -> bool:
        """Whether a fetch or a copy will report."""
        return self._arrivals.in_flight or self._retraction.copying

    @property
    def slots_used(self) -> int:
        """Requests in slots."""
        return self._config.slots - len(self._free_slots)

    def check(self) -> None:
        """Prove that pages, locks and slots are accounted for; raises `InvariantError`."""
        self.memory.check()
        self.host.check()
        in_slots = [req.rid for req in self._reqs.values() if req.slot is not None]
        if len(in_slots) != self.slots_used:
            raise InvariantError(f"{in_slots} hold slots, but {self.slots_used} are used")
        owned = sum(len(req.owned) for req in self._reqs.values())
        held = sum(
            self.memory.pool.count(state)
            for state in (PageState.OWNED, PageState.ARRIVING, PageState.COPYING)
        )
        if owned != held:
            raise InvariantError(f"{list(self._reqs)} own {owned} pages, but {held} are owned")
        if not self._reqs and self.host.free != self.host.total:
            raise InvariantError(f"no request, but host pages are {self.host.counts()}")

    # ---- intake and end ----

    def _intake(self, router: str, command: Decode, now: float) -> None:
        self._cancel(command.rid, command.attempt - 1, now)
        present = self._reqs.get(command.rid)
        if present is not None and present.attempt >= command.attempt:
            return  # the same attempt or a newer one is here already
        self._number += 1
        self.counters.requests += 1
        req = Req(
            rid=command.rid,
            attempt=command.attempt,
            router=router,
            arrival=self._number,
            token_ids=list(command.token_ids),
            prompt_len=command.prompt_len,
            params=command.params,
            priority=command.priority,
            extra_key=command.extra_key,
            arrived_at=now,
            started_at=now,
        )
        if problem := self._never_fits(req, command):
            self._refuse(req, *problem)
            return
        if present is not None:
            self._refuse(req, "no_room", "the pages of an older attempt are still being copied")
            return
        kv_len = command.baton.kv_len
        self.memory.match(req, kv_len)
        if not self._has_room(req, self.memory.pages_for(kv_len) - len(req.pages)):
            self.counters.no_room += 1
            self.memory.release(req)
            self._refuse(req, "no_room", "")
            return
        req.slot = self._free_slots.popleft()
        self._reqs[req.rid] = req
        if arrived := self._arrivals.start(req, command.baton):
            self._join(arrived)

    def _never_fits(self, req: Req, command: Decode) -> tuple[RefusalReason, str] | None:
        baton = command.baton
        final_len = self._final_len(req)
        if final_len >= self._context_len or self.memory.pages_for(final_len) > self.memory.pool.total:
            return "too_long", f"up to {final_len + 1} tokens exceed this worker's context or pages"
        if baton.kv_format != self._kv_format:
            return "unreachable", f"KV format {baton.kv_format} is not this worker's {self._kv_format}"
        if baton.kv_len != len(req.token_ids) - 1:
            return "internal", f"the baton covers {baton.kv_len} tokens of {len(req.token_ids)}"
        return None

    def _has_room(self, req: Req, missing: int) -> bool:
        """Whether the request fits beside the growth of those that are here already."""
        share = self.memory.room / self.memory.pool.total
        self._readmitting |= share >= self._config.readmit_share or len(self._reqs) == 0
        if not self._free_slots or self._retraction.pressed or not self._readmitting:
            return False
        present = [*self._running.values(), *self._joining, *self._arrivals.requests]
        if not present:
            return self.memory.cache.make_room(missing)
        growth = sum(self._expected_growth(other) for other in [*present, req])
        if self.memory.room < missing + self.memory.pages_for(int(growth)) + len(present):
            return False
        arriving = sum(len(other.owned) for other in self._arrivals.requests) + missing
        largest = max(self.memory.pages_for(self._final_len(other)) for other in present)
        usable = self.memory.pool.total - self._arrivals.quarantined_pages
        return arriving + largest <= usable and self.memory.cache.make_room(missing)

    def _expected_growth(self, req: Req) -> float:
        return min(req.remaining_new_tokens, self._config.clip_max_new_tokens) * self._ratio.value

    def _final_len(self, req: Req) -> int:
        """Tokens whose KV the request can ever need: all but the very last one."""
        return req.prompt_len + req.params.max_new_tokens - 1

    def _join(self, arrived: Arrived) -> None:
        req = arrived.req
        self._joining.append(req)
        self.counters.observations.append(("transfer_seconds", arrived.fetch_seconds))
        joined = Joined(req.rid, req.attempt, arrived.fetched_bytes, req.cached_len, arrived.fetch_seconds)
        self._effects.append(Send(req.router, joined))

    def _refuse(self, req: Req, reason: RefusalReason, detail: str) -> None:
        """Tell the router; the request holds no pages any more."""
        self.counters.refused += 1
        self._forget(req)
        self._effects.append(Send(req.router, Refused(req.rid, req.attempt, reason, detail)))

    def _cancel(self, rid: str, attempt: int, now: float) -> None:
        req = self._reqs.get(rid)
        if req is not None and req.attempt <= attempt:
            self.counters.cancelled += 1
            self._drop(req, now)

    def _drop(self, req: Req, now: float) -> None:
        """Give up everything the request holds, in whatever state it is."""
        if self._retraction.is_copying(req):
            self._dropped.append(req)  # again when the copy has ended
            return
        if req in self._joining:
            self._joining.remove(req)
            self.memory.release(req)
        elif self._running.get(req.rid) is req:
            self.memory.commit(req)
            self.memory.release(req)
        elif not self._arrivals.abandon(req, now) and not self._retraction.drop(req):
            raise InvariantError(f"request {req.rid} is in no state that can be dropped")
        self._forget(req)

    def _finish(self, req: Req) -> None:
        self.counters.finished += 1
        if self._running.get(req.rid) is req:
            self.memory.commit(req)
            self.memory.release(req)
        elif not self._retraction.drop(req):  # it ended with the very step it was retracted at
            raise InvariantError(f"request {req.rid} finished, but neither runs nor leaves")
        self._forget(req)

    def _forget(self, req: Req) -> None:
        if self._reqs.get(req.rid) is req:
            del self._reqs[req.rid]
            self._running.pop(req.rid, None)
        self._leave_slot(req)
        if not self._reqs:
            self._ratio.reset()

    def _leave_slot(self, req: Req) -> None:
        """The slot may be taken again at once: the device applies joins in the order of the steps."""
        if req.slot is not None:
            self._free_slots.append(req.slot)
            req.slot = None

    # ---- planning ----

    def _prebuilt(self) -> ScheduleBatch:
        joins = []
        for req in self._joining:
            req.launched_len = req.kv_len
            self._running[req.rid] = req
            joins.append(_join(req))
        self._joining.clear()
        self.counters.prebuilt_steps += 1
        return self._step(ForwardMode.PREBUILT, [], joins=tuple(joins))

    def _decode(self) -> ScheduleBatch | None:
        self._make_room_ahead()
        rows, grants = [], []
        for req in self._running.values():
            if req.launched_len >= self._final_len(req):
                continue  # ends by length with the step in flight
            if req.pages_missing(req.launched_len + 1, self.memory.page_size):
                pages = self.memory.give(req, 1)
                if pages is None:
                    self.counters.sat_out += 1
                    continue
                assert req.slot is not None
                grants.append(PageGrant(req.slot, tuple(pages)))
            req.launched_len += 1
            rows.append(req)
        if not rows:
            return None
        self._ratio.decay()
        self.counters.decode_steps += 1
        return self._step(ForwardMode.DECODE, rows, grants=tuple(grants))

    def _step(
        self,
        mode: ForwardMode,
        rows: list[Req],
        joins: tuple[SlotJoin, ...] = (),
        grants: tuple[PageGrant, ...] = (),
    ) -> ScheduleBatch:
        self.memory.launched_step += 1
        self._planned[self.memory.launched_step] = rows
        slots = [req.slot for req in rows if req.slot is not None]
        return ScheduleBatch(self.memory.launched_step, mode, joins, grants, decode_slots=slots)

    def _make_room_ahead(self) -> None:
        """Retract until the next `retract_steps` steps of those who stay fit; one always stays."""
        running = list(self._running.values())
        retracted = False
        while len(running) > 1 and self._pages_wanted(running) > (
            self.memory.room + self._retraction.pages_on_their_way()
        ):
            victim = self._retraction.victim(running)
            running.remove(victim)
            del self._running[victim.rid]
            self._leave_slot(victim)
            self._retraction.retract(victim)
            retracted = True
        if retracted:
            self._readmitting = False
            self._ratio.after_retraction(
                [req.output_len for req in running], [req.params.max_new_tokens for req in running]
            )
            self._send_back()

    def _pages_wanted(self, running: list[Req]) -> int:
        ahead = self._config.retract_steps
        return sum(
            req.pages_missing(min(req.launched_len + ahead, self._final_len(req)), self.memory.page_size)
            for req in running
        )

    def _send_back(self) -> None:
        """Start the backups whose requests have settled; without host memory another attempt recomputes."""
        for req in self._retraction.advance():
            self.memory.commit(req)
            self.memory.release(req)
            self._refuse(req, "stale", "retracted, and host memory had no room for its pages")

    def _resume(self) -> None:
        while self._free_slots:
            running = list(self._running.values())
            growth = self._pages_wanted(running) + len(running) + 1 if running or self._joining else 0
            req = self._retraction.resume(growth)
            if req is None:
                return
            req.slot = self._free_slots.popleft()

    def _flush(self, now: float) -> None:
        """One message a router, whatever the number of steps and requests in it."""
        for router, rows in self._unsent.items():
            self.counters.generated_tokens += len(rows)
            self._effects.append(Send(router, Generated(tuple(rows))))
        if self._unsent:
            self._unsent = {}
            self._next_flush = now + self._config.flush_seconds

    def _load(self) -> Load:
        in_slots = [*self._running.values(), *self._joining, *self._arrivals.requests]
        return Load(
            queued=len(self._retraction.requests),
            running=len(in_slots),
            running_tokens=sum(len(req.token_ids) for req in in_slots),
            free_pages=self.memory.room,
            slots_free=len(self._free_slots),
            accepting=not self._retraction.pressed,
        )


def _join(req: Req) -> SlotJoin:
    assert req.slot is not None
    return SlotJoin(
        slot=req.slot,
        pages=tuple(req.pages),
        kv_len=req.kv_len,
        params=req.params,
        prompt_len=req.prompt_len,
        token_ids=tuple(req.token_ids) if req.params.needs_history else (),
        last_token=req.token_ids[-1],
    )

"""Plans the steps of the requests that are here, and settles what these sampled.

A request's way through a decode worker (`decode/lifecycle.py` has every state and event):

    Decode ─► waiting ─► transferring ─► joining ─► running ─► finished
              └──(transfer_queue)──┘        ▲          ├─► retracting ─► backing_up ─► retracted ─► restoring ─┐
                                            └──────────┼───────────────────(retraction)────────────────────────┘
                                                       └─► migrating ─► leased ─► released
                                                           └───(migration)───┘
    Serve ─► waiting ─► extending ─► joining ─► …      its prompt is computed here (local_prompts)
                                  └► leased ─► released          it goes on elsewhere (migration)

A request waits only for a prefix that another one is fetching. Steps overlap: what a row sampled after its request
ended is discarded, and the pages that an ended request held are retired, not freed. A draining worker refuses new
requests, and the router migrates those that are here.

Each part keeps the requests of some states, and none of them knows all. `Intake` takes them in, `Endings` knows what a
request holds in each state, and this file puts all requests that are here to the rules of `Retraction`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from decode.admission import Admission
from decode.config import DecodeConfig
from decode.counters import DecodeCounters
from decode.endings import Endings
from decode.intake import Intake
from decode.lifecycle import ENDED, LEASE_ENDS, TRANSITIONS, DecodeEvent, DecodeState
from decode.local_prompts import LocalPrompts, Settled
from decode.migration import Migrations
from decode.output_buffer import OutputBuffer
from decode.pauses import Pauses
from decode.retraction import Retraction
from decode.running_batch import RunningBatch
from decode.transfer_queue import NotTransferred, TransferQueue, Transferred
from decode.turns import Turns
from shared.batch.effects import Send, WorkerEffect
from shared.batch.req import Req
from shared.batch.schedule_batch import ForwardMode, ScheduleBatch
from shared.kv.kv_memory import KvMemory
from shared.kv.leases import LeaseEnd, LeaseTable
from shared.kv.page_pool import PagePool, PageState
from shared.links.events import LinkEvent, PeerDown, Received
from shared.primitives.errors import InvariantError
from shared.scheduling.prompt_rows import prefilled, scored_messages
from shared.scheduling.request_states import RequestStates, check_states
from shared.scheduling.router_sessions import RouterSessions
from shared.scheduling.step_cost import two_digits
from shared.scheduling.tenant_shares import is_below_share, tokens_by_tenant
from shared.transfer.protocol import FetchEvent, LeaseWords
from shared.wire.baton import Holder
from shared.wire.messages import (
    Cancel,
    Decode,
    FinishReason,
    Load,
    Migrate,
    Serve,
)
from shared.wire.sampled import Sampled, TokenLogprobs


class DecodeScheduler:
    """The core of a decode worker; a `Scheduler` (shared/scheduling/event_loop.py says who calls what when)."""

    def __init__(
        self,
        config: DecodeConfig,
        *,
        pages: int,
        host_pages: int,
        context_len: int,
        holder: Holder,
        words: LeaseWords,
        kv_format: str,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ):
        self._eos_token_ids = eos_token_ids
        self.memory = KvMemory(pages, config.page_size, config.radix_eviction_policy)
        self.host = PagePool(host_pages)
        self.counters = DecodeCounters()
        self.states = RequestStates(TRANSITIONS)
        self._now = 0.0
        self._effects = effects = list[WorkerEffect]()
        memory, states, counters = self.memory, self.states, self.counters
        self.leases = LeaseTable(
            memory, holder, words, kv_format, config.lease_seconds, counters, effects, self._on_lease_end
        )
        self._admission = Admission(
            config,
            memory,
            context_len,
            kv_format,
            vocab_size,
            settled=lambda: self._with_pages,
            present=lambda: self._present,
        )
        self._transfer_queue = TransferQueue(memory, states, counters, effects)
        self._batch = RunningBatch(memory, states, counters, config.max_running_requests)
        self._output_buffer = OutputBuffer(config.flush_seconds)
        self._prompts = LocalPrompts(memory, counters, config.local_tokens_max, config.itl_target_seconds)
        self._retraction = Retraction(
            memory,
            self.host,
            states,
            counters,
            effects,
            config.retract_steps,
            self._admission.pages_kept,
            config.retractions_max,
            Turns(config.turn_seconds),
            self._prompts,
            self._admission.growth_within,
        )
        self._sessions = RouterSessions(self.leases, self._load, config.load_seconds, effects)
        self._pauses = Pauses(self._sessions, self._output_buffer, effects)
        self._migrations = Migrations(
            memory, self._batch, self.leases, self._output_buffer, states, counters, effects
        )
        self._endings = self._build_endings()
        self._reqs = self._endings.reqs  # every request that is here and not leased, by rid
        self._intake = self._build_intake()

    def _build_endings(self) -> Endings:
        return Endings(
            self.memory,
            self.states,
            self.counters,
            self._effects,
            self._sessions,
            self.leases,
            self._admission,
            self._output_buffer,
            self._batch,
            self._transfer_queue,
            self._prompts,
            self._retraction,
            self._migrations,
        )

    def _build_intake(self) -> Intake:
        return Intake(
            self.memory,
            self.states,
            self.counters,
            self._effects,
            self._sessions,
            self._admission,
            self._batch,
            self._transfer_queue,
            self._prompts,
            self._retraction,
            self._endings,
        )

    # ---- events ----

    def on_link(self, event: LinkEvent, now: float) -> None:
        """A router came, went, or sent a command."""
        match self._sessions.on_link(event, now):
            case Received(router, Decode() as command):
                self._intake.take_prefilled(router, command, now)
            case Received(router, Serve() as command):
                self._intake.take_prompt(router, command, now)
            case Received(_, Migrate(rid, attempt)):
                if (req := self._reqs.get(rid)) and req.attempt == attempt:
                    self._migrations.ask(req)
            case Received(_, Cancel(rid, attempt)):
                self._endings.cancel(rid, attempt)
            case PeerDown(router, _):
                self._output_buffer.forget(router)
                for req in [req for req in self._reqs.values() if req.router == router]:
                    self._endings.drop(req)
            case Received(router, message):
                raise InvariantError(f"a decode worker got {type(message).__name__} from {router}")

    def on_fetch(self, event: FetchEvent, now: float) -> None:
        """A fetch landed, went stale, failed or was proven to have ended."""
        match self._transfer_queue.on_fetch(event, now):
            case Transferred() as arrived:
                self._intake.join(arrived)
            case NotTransferred(req, cause, reason, detail):
                self._endings.refuse(req, cause, reason, detail)

    def on_copy(self, copy_id: int, now: float) -> None:
        """Pages are in host memory, or back from it."""
        self._retraction.turns.now = now
        req = self._retraction.on_copy(copy_id)
        if req.state is DecodeState.JOINING:
            self._join_again(req)
        elif req.state is DecodeState.CANCELLED:  # while its pages were copied
            self._endings.forget(req)

    def tick(self, now: float) -> None:
        """Send the tokens that have waited long enough, tell who is paused, end leases, push the load."""
        self._now = now
        self._flush_due(now)
        self._pauses.tell(self._retraction.paused, now)
        self._sessions.tick(now)

    def start_draining(self) -> None:
        """Refuse new requests; those that are here continue until they end or the routers migrate them."""
        self._sessions.start_draining()

    def reclaim(self, completed_step: int) -> None:
        """The device has completed all steps up to `completed_step`."""
        self.memory.pool.reclaim(completed_step)

    # ---- steps ----

    def settles_first(self) -> bool:
        """A DECODE step needs nothing that only the CPU knows about the one before."""
        return False

    def plan(self, now: float) -> ScheduleBatch | None:
        """The next step: requests whose KV has arrived join, and every running one decodes one token."""
        self._retraction.turns.now = now
        served = self._prompts.served
        detail = "it migrates, and its pages would have to be computed again"
        for req in [req for req in self._migrations.without_pages if req not in served]:
            self._endings.return_to_router(req, DecodeEvent.HOST_FULL, "stale", detail)
        self._resume_retracted()
        self._intake.admit_waiting(now)
        self._batch.start_joining()
        self._retraction.look(self._batch.running.values())
        self._migrations.start()
        self._lease_settled(now)
        if self._take_turns() | self._retract_until_fits():
            self._back_up_settled()
        batch = self._batch.next_step(self._prompts.plan)
        if batch is not None:
            if batch.mode is ForwardMode.EXTEND:
                self._admission.invalidate_sums()
            else:
                self._admission.on_step(now)
            return batch
        self._admission.invalidate_sums()
        if deadlocked := self._deadlocked():
            detail = "the pages it needs are in quarantine"
            self._endings.return_to_router(deadlocked, DecodeEvent.DEADLOCKED, "no_room", detail)
        return None

    def settle(self, batch: ScheduleBatch, sampled: Sampled, now: float) -> None:
        """Append what the step sampled, end the requests that are done, send the routers what is due."""
        self._now = self._retraction.turns.now = now
        rows = self._batch.settle(batch.step, sampled.sat_out)
        for settled in self._prompts.settle(batch, sampled.seconds):
            self._settle_prompt(settled, sampled, now)
        self._admission.on_change()
        for row, why in sampled.failed.items():
            if row < len(rows):
                self._endings.fail(rows[row], why)
        tokenless, ended = self._append(rows, sampled)
        self._output_buffer.add([req for req in rows if req not in tokenless] if tokenless else rows)
        finished = [self._endings.finish(req, reason, now) for req, reason in ended]
        self._flush_due(now)
        if ended:
            self._effects += [*self._output_buffer.flush_of(req for req, _ in ended), *finished]
        self._lease_settled(now)
        self._back_up_settled()

    def _append(self, rows: list[Req], sampled: Sampled) -> tuple[list[Req], list[tuple[Req, FinishReason]]]:
        """Append each row's token; the requests that get none, as they had ended or sat out, and those that end now."""
        tokenless = [rows[row] for row in sampled.sat_out]
        sat_out = set(tokenless)
        extra = 0
        ended: list[tuple[Req, FinishReason]] = []
        running, eos_token_ids = DecodeState.RUNNING, self._eos_token_ids
        for row, logprobs in sampled.logprobs.items():
            if row < len(rows):
                rows[row].logprobs.append(logprobs)
        for req, token_id in zip(rows, sampled.token_ids, strict=False):  # prompts come behind
            if sat_out and req in sat_out:
                continue
            if req.state is not running and req.state in ENDED:
                tokenless.append(req)
                extra += 1
                continue
            req.token_ids.append(token_id)
            kv_len = req.kv_len = req.kv_len + 1
            may_end = kv_len >= req.final_kv_len or token_id in eos_token_ids or req.params.stop_token_ids
            if may_end and (reason := req.finish_reason(eos_token_ids)):
                ended.append((req, reason))
        self.counters.extra_tokens += extra
        self.counters.generated_tokens += len(rows) - len(tokenless)
        self.counters.mask_seconds += sum(sampled.mask_seconds.values())
        return tokenless, ended

    # ---- what the loop and the process ask ----

    def take_effects(self) -> list[WorkerEffect]:
        """What is to be done, in order; each effect is given once."""
        effects = list(self._effects)
        self._effects.clear()
        return effects

    def next_deadline(self) -> float | None:
        """When buffered tokens have waited long enough, a lease ends, or routers should hear of a load or a pause."""
        deadlines = (
            self._output_buffer.deadline(),
            self._sessions.next_deadline(),
            self._pauses.next_deadline(),
        )
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def awaits_transfer(self) -> bool:
        """Whether a fetch or a copy will report."""
        return self._transfer_queue.in_flight or self._retraction.copying

    @property
    def slots_used(self) -> int:
        """Requests in slots."""
        return self._batch.slots_used

    @property
    def leases_held(self) -> int:
        """Leases that live."""
        return len(self.leases)

    @property
    def drained(self) -> bool:
        """Whether no request, lease or buffered token is left, and no request is on its way here."""
        return self._sessions.drained and not (self._reqs or self._output_buffer)

    @property
    def requests(self) -> list[Req]:
        """Every request that is here, those whose pages are leased included."""
        return [*self._reqs.values(), *self.leases.reqs]

    def check(self) -> None:
        """Prove that pages, locks, slots and states agree; raises `InvariantError`."""
        self.memory.check()
        self.host.check()
        self._check_resources()
        self._admission.check()
        if not self._reqs and self.host.free != self.host.total:
            raise InvariantError(f"no request, but host pages are {self.host.counts()}")

    # ---- prompts ----

    def _join_again(self, req: Req) -> None:
        """A retracted request has its KV again, or a prompt is computed."""
        self._batch.join(req)
        self._admission.invalidate_sums()

    def _settle_prompt(self, settled: Settled, sampled: Sampled, now: float) -> None:
        """A row of a prompt is computed: tell its scores; one whose last row it was joins."""
        prompt, row, req = settled.prompt, settled.row, settled.prompt.req
        scored = scored_messages(req, settled.start + 1, sampled.scored.get(settled.place, ()))
        self._effects += [Send(req.router, message) for message in scored]
        if not settled.last:
            return
        if row is None:
            self._retraction.on_recomputed(req, prompt.seconds)
            self._join_again(req)
        elif row in sampled.failed:
            self._endings.fail(req, sampled.failed[row])
        else:
            self._begin_stream(req, sampled.token_ids[row], sampled.logprobs.get(row), now)

    def _begin_stream(self, req: Req, token_id: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """The first token of a prompt is sampled: tell it, and go on, here or elsewhere, or end."""
        req.token_ids.append(token_id)
        req.sent_len = len(req.token_ids)
        finish = req.finish_reason(self._eos_token_ids)
        baton = None if finish else self._migrations.hand_over(req, now)
        message = prefilled(req, token_id, logprobs, finish, now, baton)
        self._effects.append(Send(req.router, self.counters.computed(message)))
        if finish:
            self._endings.end_finished(req, now)
        elif baton is not None:
            self._endings.forget(req)
        else:
            self.states.advance(req, DecodeEvent.COMPUTED)
            self._join_again(req)

    # ---- slots and pages ----

    @property
    def _with_pages(self) -> list[Req]:
        """Requests that have the pages of all their tokens and can be retracted or put back."""
        return [*self._batch.reqs, *self._prompts.served]

    @property
    def _present(self) -> list[Req]:
        """Requests that have pages, those whose KV is on its way included."""
        return [*self._with_pages, *self._transfer_queue.transferring]

    def _resume_retracted(self) -> None:
        """Give slots to the retracted requests whose pages fit again."""
        if not self._retraction.active:
            return  # as nearly always
        while self._has_slot_to_resume() and (req := self._retraction.resume(self._with_pages)):
            self._batch.take_slot(req)
            if req.state is DecodeState.JOINING:  # all of it was cached
                self._join_again(req)

    def _has_slot_to_resume(self) -> bool:
        return self._batch.free_slots > (self._admission.slots_kept if self._batch.slots_used else 0)

    def _take_turns(self) -> bool:
        """Let those whose turn is over leave for the first in line; whether any left."""
        if not self._retraction.active:
            return False
        leaving = self._retraction.take_turns(
            self._batch.running.values(),
            self._present,
            has_slot=self._has_slot_to_resume(),
        )
        for req in leaving:
            self._batch.remove(req)
        return bool(leaving)

    def _retract_until_fits(self) -> bool:
        """Retract running requests until the next steps of the others fit; whether any was retracted."""
        running = self._batch.running.values()
        while (prompts := self._prompts.served) and self._retraction.lacks_pages(running):
            above = [req for req in prompts if not self._holds_little(req)]
            if not (above or self._retraction.lacks_pages(running, alone=True)):
                break  # a stream of a tenant that holds more is retracted for them, as for one whose pages arrive
            self._endings.put_back((above or prompts)[-1])
        victims = self._retraction.retract_until_fits(running)
        for victim in victims:
            self._batch.remove(victim)
        if victims:
            self._admission.after_retraction(list(self._batch.running.values()))
        return bool(victims)

    def _holds_little(self, req: Req) -> bool:
        """Whether the tenant of a prompt is below its share without it, so that it may have what is kept for such."""
        capacity = self.memory.pool.total * self.memory.page_size
        others = tokens_by_tenant(each for each in self._present if each is not req)
        return is_below_share(req, others, req.final_kv_len, capacity)

    def _deadlocked(self) -> Req | None:
        """One request to give back, if no step, copy or fetch can free pages and only the end of a quarantine could."""
        retiring = self.memory.pool.count(PageState.RETIRING)
        if self._batch.in_flight or retiring or self._transfer_queue.transferring or self._retraction.copying:
            return None
        return next(iter([*self._batch.running.values(), *self._retraction.line]), None)

    def _load(self) -> Load:
        """The load that the routers are told."""
        in_slots, rows, waiting = self._present, len(self._batch.running), len(self._transfer_queue.waiting)
        slots_free, rate = max(0, self._batch.free_slots - waiting), self._prompts.rate(rows)
        return Load(
            queued=self._retraction.count + waiting,
            queued_tokens=self._prompts.tokens_left,
            running=len(in_slots),
            running_tokens=sum(len(req.token_ids) for req in in_slots),
            free_pages=self.memory.available_pages,
            slots_free=slots_free,
            slots_for_new=0 if self._retraction.active else self._admission.slots_for_new(slots_free),
            accepting=not self._retraction.active,
            pages_for_new=0 if self._retraction.active else self._admission.pages_for_new(),
            pages_foreseen=self._sessions.pages_foreseen,
            pages_a_second=self._admission.returned.per_second(self._now),
            extend_rate=rate.tokens_per_second,
            extend_rate_alone=self._prompts.rate(0).tokens_per_second,
            position_seconds=rate.position_seconds,
            step_seconds=two_digits(self._prompts.cost.decode_seconds(rows)),
            pages_arriving=self.memory.pool.count(PageState.ARRIVING),
            pages_arriving_a_second=self._transfer_queue.link_rate.per_second(self._now),
        )

    # ---- proof ----

    def _kept(self) -> Mapping[DecodeState, Iterable[Req]]:
        """The requests that the parts keep, by the state in which they keep them."""
        return {
            DecodeState.WAITING: self._transfer_queue.waiting,
            DecodeState.TRANSFERRING: self._transfer_queue.transferring,
            DecodeState.JOINING: self._batch.joining,
            DecodeState.RUNNING: self._batch.running.values(),
            DecodeState.MIGRATING: self._migrations.settling,
            DecodeState.LEASED: self.leases.reqs,
            DecodeState.RETRACTING: self._retraction.settling,
            **self._retraction.copied,
            **self._retraction.in_line,
            DecodeState.EXTENDING: self._prompts.extending,
        }

    def _check_resources(self) -> None:
        """Prove that states, pages and slots of all requests that are here agree; raises `InvariantError`."""
        reqs = self.requests
        check_states(self._kept(), reqs)
        in_slots = [req.rid for req in reqs if req.slot is not None]
        if len(in_slots) != self._batch.slots_used:
            raise InvariantError(f"{in_slots} hold slots, but {self._batch.slots_used} are used")
        owned = sum(len(req.owned) for req in reqs)
        states = PageState.OWNED, PageState.ARRIVING, PageState.COPYING
        held = sum(self.memory.pool.count(state) for state in states)
        if owned != held:
            raise InvariantError(f"{[req.rid for req in reqs]} own {owned} pages, but {held} are owned")

    # ---- what follows a step ----

    def _back_up_settled(self) -> None:
        """Start the backups of requests that have settled; without host memory another attempt recomputes them."""
        for req in self._retraction.start_backups():
            detail = "retracted, and host memory had no room for its pages"
            self._endings.return_to_router(req, DecodeEvent.HOST_FULL, "stale", detail)

    def _lease_settled(self, now: float) -> None:
        """Lease the pages of migrating requests that have settled; the leases hold them from now on."""
        for req in self._migrations.lease_settled(now):
            self._endings.forget(req)

    def _on_lease_end(self, req: Req, end: LeaseEnd) -> None:
        self.states.advance(req, LEASE_ENDS[end])

    def _flush_due(self, now: float) -> None:
        if self._output_buffer.due(now):
            self._effects.extend(self._output_buffer.flush(now))

"""Plans EXTEND batches, and keeps what they computed under leases until a decode worker has fetched it.

A request's way through a prefill worker (`prefill/lifecycle.py` has every state and event):

    Prefill ─► waiting ─► chunked ─► running ─► leased ─► released
                  └──────────────────▲   └─► finished with its first token

It does not know decode workers: any worker that has the baton may read. Under overload requests wait before they are
computed: no new one starts while leases hold more than `lease_fraction` of the pool. A draining worker refuses new
requests, and is drained once its queue is computed and its leases have ended.
"""

from __future__ import annotations

from collections import Counter

from prefill.config import PrefillConfig
from prefill.counters import PrefillCounters
from prefill.lifecycle import LEASE_ENDS, TRANSITIONS, PrefillEvent, PrefillState
from prefill.prompt_batch import PromptBatch
from shared.batch.effects import Send, WorkerEffect
from shared.batch.req import Req
from shared.batch.schedule_batch import ScheduleBatch
from shared.kv.kv_memory import KvMemory
from shared.kv.leases import LeaseEnd, LeaseTable
from shared.kv.page_pool import PageState
from shared.links.events import LinkEvent, PeerDown, Received
from shared.primitives.errors import InvariantError
from shared.scheduling.prefill_adder import AddResult, PrefillAdder, step_input
from shared.scheduling.prompt_queue import PromptQueue
from shared.scheduling.prompt_rows import prefilled, scored_messages
from shared.scheduling.request_states import RequestStates, check_states
from shared.scheduling.router_sessions import RouterSessions
from shared.scheduling.step_cost import StepCost
from shared.scheduling.tenant_shares import is_below_share, share_of, tokens_by_tenant
from shared.transfer.protocol import FetchEvent, LeaseWords
from shared.wire.baton import Holder
from shared.wire.messages import Cancel, Load, Prefill, Refused
from shared.wire.sampled import Sampled, TokenLogprobs


class PrefillScheduler:
    """The core of a prefill worker."""

    def __init__(
        self,
        config: PrefillConfig,
        *,
        pages: int,
        context_len: int,
        holder: Holder,
        words: LeaseWords,
        kv_format: str,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ):
        self._config = config
        self._eos_token_ids = eos_token_ids
        self.memory = KvMemory(pages, config.page_size, config.radix_eviction_policy)
        self.counters = PrefillCounters()
        self.states = RequestStates(TRANSITIONS)
        self._effects: list[WorkerEffect] = []
        self.leases = LeaseTable(
            self.memory,
            holder,
            words,
            kv_format,
            config.lease_seconds,
            self.counters,
            self._effects,
            self._on_lease_end,
        )
        self._words_kept = self.leases.free - share_of(self.leases.free, config.tenant_share_max)
        self.waiting = PromptQueue(config.queue_rules, self.memory, context_len, vocab_size)
        self._cost = StepCost()
        self.batch = PromptBatch(self.memory, self.states, self.counters, config.max_running_requests)
        self._sessions = RouterSessions(self.leases, self._load, config.load_seconds, self._effects)
        self._sequence = 0
        self._step_input = step_input(
            config.max_prefill_tokens, config.chunked_prefill_size, config.page_size
        )
        self._short_tokens = 0.0  # input that short prompts may take of the steps of a chunked one
        self._short_tokens_max = self._step_input - config.page_size  # it keeps a page

    # ---- what comes in ----

    def on_link(self, event: LinkEvent, now: float) -> None:
        """A router came, went, or sent a command."""
        match self._sessions.on_link(event, now):
            case Received(router, Prefill() as command):
                self._intake(router, command, now)
            case Received(_, Cancel(rid, attempt)):
                self._cancel(rid, attempt)
            case PeerDown(router, _):
                for req in [*self.waiting.reqs, *self.batch.reqs]:
                    if req.router == router:
                        self._drop(req)
            case Received(router, message):
                raise InvariantError(f"a prefill worker got {type(message).__name__} from {router}")

    def on_fetch(self, event: FetchEvent, now: float) -> None:
        """A prefill worker starts no fetches."""
        raise InvariantError(f"{type(event).__name__} came at {now}, but no fetch was started")

    def on_copy(self, copy_id: int, now: float) -> None:
        """A prefill worker starts no copies."""
        raise InvariantError(f"copy {copy_id} finished at {now}, but none was started")

    def tick(self, now: float) -> None:
        """End leases that were not renewed, push the load."""
        self._sessions.tick(now)

    def start_draining(self) -> None:
        """Refuse new requests; those that are here are computed."""
        self._sessions.start_draining()

    def reclaim(self, completed_step: int) -> None:
        """The device has completed all steps up to `completed_step`."""
        self.memory.pool.reclaim(completed_step)

    # ---- steps ----

    def settles_first(self) -> bool:
        """Whether of two consecutive EXTEND steps the first is settled before the second is planned, for its TTFT.

        So are chunks whose steps short prompts may join: one that comes then waits for the step under way alone.
        """
        if self.batch.chunked is not None and self._config.short_share > 0:
            return True
        return self.batch.ends_a_prompt and bool(self.waiting or self.batch.chunked)

    def plan(self, now: float) -> ScheduleBatch | None:
        """The next EXTEND batch: the next chunk of the chunked request first, then waiting ones that fit."""
        short_tokens = self._short_tokens_now()
        adder = PrefillAdder(self.memory, self._step_input, short_tokens)
        if self.batch.chunked is None or adder.add_chunked(self.batch.chunked) is AddResult.CONTINUE:
            self._admit(adder, now)
        if not adder.extends:
            return None
        cost = adder.fill()
        if adder.cut is not None:
            self._short_tokens = short_tokens - cost
        return self.batch.extend(adder.extends)

    def settle(self, batch: ScheduleBatch, sampled: Sampled, now: float) -> None:
        """Commit what the step computed; hand over the requests whose prompt it completed."""
        rows, extends = enumerate(sampled.token_ids), self.batch.settle(batch.step)
        self._cost.observe_extend(
            0, [(each.start, each.end - each.start) for each in extends], sampled.seconds
        )
        for place, extend in enumerate(extends):
            row, token_id = next(rows) if extend.last else (None, None)
            req = extend.req
            if req.state is PrefillState.CANCELLED:
                continue  # while the step ran
            req.kv_len = extend.end
            scored = scored_messages(req, extend.start + 1, sampled.scored.get(place, ()))
            self._effects += [Send(req.router, message) for message in scored]
            if row is None or token_id is None:
                # One that is scored computes what may be cached: until its end it would hold such blocks twice.
                if req.params.prompt_logprobs < 0:
                    self.memory.commit(req)
            elif row in sampled.failed:
                self._fail(req, sampled.failed[row])
            else:
                self._hand_over(req, token_id, sampled.logprobs.get(row), now)

    # ---- what goes out ----

    def take_effects(self) -> list[WorkerEffect]:
        """What is to be done, in order; each effect is given once."""
        effects = list(self._effects)
        self._effects.clear()
        return effects

    def next_deadline(self) -> float | None:
        """When the next lease ends by itself, or the routers should hear of a new load."""
        return self._sessions.next_deadline()

    def awaits_transfer(self) -> bool:
        """No: it fetches nothing."""
        return False

    @property
    def slots_used(self) -> int:
        """Requests in slots."""
        return len(self.batch)

    @property
    def leases_held(self) -> int:
        """Leases that live."""
        return len(self.leases)

    @property
    def drained(self) -> bool:
        """Whether no request and no lease is left, and no request is on its way here."""
        return self._sessions.drained and not (self.waiting or self.batch)

    @property
    def requests(self) -> list[Req]:
        """Every request that is here, those whose pages are leased included."""
        return [*self.waiting.reqs, *self.batch.reqs, *self.leases.reqs]

    def check(self) -> None:
        """Prove that pages, locks, slots and states agree; raises `InvariantError`."""
        self.memory.check()
        if (tokens := tokens_by_tenant(self.leases.reqs)) != self.leases.tokens_by_tenant:
            raise InvariantError(f"{tokens} are under lease, but {self.leases.tokens_by_tenant} are counted")
        check_states(
            {
                PrefillState.WAITING: self.waiting.reqs,
                PrefillState.CHUNKED: [self.batch.chunked] if self.batch.chunked else [],
                PrefillState.RUNNING: [req for req in self.batch.reqs if req is not self.batch.chunked],
                PrefillState.LEASED: self.leases.reqs,
            },
            self.requests,
        )
        holders = [*self.batch.reqs, *self.leases.reqs]
        owned = sum(len(req.owned) for req in holders)
        if owned != self.memory.pool.count(PageState.OWNED):
            raise InvariantError(
                f"{[req.rid for req in holders]} own {owned} pages, "
                f"but {self.memory.pool.count(PageState.OWNED)} are owned"
            )
        self.batch.check()

    # ---- intake and end ----

    def _intake(self, router: str, command: Prefill, now: float) -> None:
        self._cancel(command.rid, command.attempt - 1)
        if self._find(command.rid) or self.leases.find(command.rid):
            return  # the same attempt or a newer one is here already
        self.counters.requests += 1
        if problem := self.waiting.refusal(command, draining=self._sessions.draining):
            self.counters.refused += 1
            self._effects.append(Send(router, Refused(command.rid, command.attempt, *problem)))
            return
        self._sequence += 1
        self.waiting.add(Req.of(command, router, self._sequence, now, TRANSITIONS.start))

    def _cancel(self, rid: str, attempt: int) -> None:
        """Drop the request, whatever its state, if it is of this attempt or an older one."""
        self.counters.cancelled += self.leases.cancel(rid, attempt)
        req = self._find(rid)
        if req is not None and req.attempt <= attempt:
            self.counters.cancelled += 1
            self._drop(req)

    def _find(self, rid: str) -> Req | None:
        """The request that waits or is computed here."""
        return self.waiting.find(rid) or self.batch.find(rid)

    def _drop(self, req: Req) -> None:
        """Give up what the request holds in its state."""
        if req.state is PrefillState.WAITING:
            self.waiting.remove(req)
        else:
            self.batch.leave(req)
            self.memory.release(req)
        self.states.advance(req, PrefillEvent.CANCELLED)

    def _on_lease_end(self, req: Req, end: LeaseEnd) -> None:
        self.states.advance(req, LEASE_ENDS[end])

    # ---- planning ----

    def _short_tokens_now(self) -> float:
        """The input that a prompt which is cut in this step leaves to short ones: what its steps have saved for them.

        Each such step adds `short_share` of its input. So a prompt that exceeds the fraction joins every few steps.
        """
        return min(self._short_tokens + self._config.short_share * self._step_input, self._short_tokens_max)

    def _admit(self, adder: PrefillAdder, now: float) -> None:
        running = self.batch.reqs
        held = self.leases.tokens_by_tenant + tokens_by_tenant(running)
        for req in self.waiting.in_order(running, held, now):
            if adder.cut is not None and len(req.token_ids) - req.cached_len > self._short_tokens_max:
                continue  # it needs chunks of its own, later: it cannot use what is left to short ones
            if not self._may_start(req, held):
                return
            result = adder.add(req)
            if adder.extends and adder.extends[-1].req is req:
                self._start(req, now)
                held[req.tenant] += len(req.token_ids)
            if result is not AddResult.CONTINUE:
                return

    def _may_start(self, req: Req, held: Counter[str]) -> bool:
        """Whether there is a slot, a lease word for every running request and one more, and few enough leases.

        `held` are the tokens of each tenant that are in slots or under lease. A request below its tenant's share may
        start whatever others have under lease; of `lease_fraction` its tenant takes an even share.
        """
        words = self.leases.free - len(self.batch)
        if not self.batch.free_slots or words <= 0:
            return False
        pages_leased = self._config.lease_fraction * self.memory.pool.total
        if is_below_share(req, held, len(req.token_ids), pages_leased * self.memory.page_size):
            return True
        return self.leases.pages <= pages_leased and words > self._words_kept

    def _start(self, req: Req, now: float) -> None:
        self.waiting.remove(req)
        self.batch.start(req, now)

    def _hand_over(self, req: Req, token_id: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """The prompt is computed and the first token sampled: lease the pages, or end here."""
        self.batch.leave(req)
        self.memory.commit_and_dedupe(req)
        req.token_ids.append(token_id)
        finish = req.finish_reason(self._eos_token_ids)
        baton = None if finish else self.leases.grant(req, now)
        if finish:
            self.memory.release(req)
        self.states.advance(req, PrefillEvent.FINISHED if finish else PrefillEvent.LEASED)
        message = prefilled(req, token_id, logprobs, finish, now, baton)
        self.counters.prefill_queue_seconds.append(message.queue_seconds)
        self.counters.prefill_compute_seconds.append(message.compute_seconds)
        self._effects.append(Send(req.router, message))

    def _fail(self, req: Req, why: str) -> None:
        """The prompt is computed, but nothing can follow it: end the request. Its pages stay in the cache."""
        self.batch.leave(req)
        self.memory.commit_and_dedupe(req)
        self.memory.release(req)
        self._sessions.fail(req, why)
        self.states.advance(req, PrefillEvent.FAILED)

    def _load(self) -> Load:
        computing = sum(len(req.token_ids) - req.launched_len for req in self.batch.reqs)
        rate = self._cost.extend_rate(0, self._step_input)
        return Load(
            queued=len(self.waiting),
            queued_tokens=self.waiting.tokens + computing,
            running=len(self.batch),
            running_tokens=sum(len(req.token_ids) for req in self.batch.reqs),
            free_pages=self.memory.available_pages,
            slots_free=self.batch.free_slots,
            extend_rate=rate.tokens_per_second,
            position_seconds=rate.position_seconds,
        )

"""Takes requests in, settles what their steps sampled, and ends them.

A request's way through a decode worker:

    Decode ─► waiting ─► arriving ─► joining ─► running ─► finished
              └── (arrivals) ──┘        ▲          ├─► retracted ─┐
                                        └──────────┼─(retraction)─┘
                                                   └─► departing ─► lent ─► Release, Cancel or expiry

A request waits only for a prefix that another one is fetching. Steps overlap: what a row sampled after its end is
discarded, and whatever an ended request held is retired, not freed. Landed requests always join; only those without
pages can be refused for lack of room. A worker that leaves refuses what is new; the router moves what is here.
"""

from __future__ import annotations

from decode.admission import Admission
from decode.config import DecodeConfig
from decode.counters import DecodeCounters
from decode.migration import Migrations
from decode.output_buffer import OutputBuffer
from decode.retraction import Retraction
from decode.running_batch import RunningBatch
from decode.transfer_queue import NotTransferred, TransferQueue, Transferred
from shared.baton import Baton, Holder
from shared.effects import Effect, Send
from shared.errors import InvariantError
from shared.kv.kv_memory import KvMemory
from shared.kv.leases import LeaseTable
from shared.kv.page_pool import PagePool, PageState
from shared.links.events import LinkEvent, PeerDown, PeerUp, Received
from shared.messages import (
    Cancel,
    Decode,
    DrainAck,
    Finished,
    Load,
    Migrate,
    RefusalReason,
    Refused,
    Release,
    Renew,
    Row,
)
from shared.req import Req
from shared.schedule_batch import ScheduleBatch
from shared.scheduling.router_sessions import RouterSessions
from shared.transfer.protocol import FetchEvent, LeaseWords


class DecodeScheduler:
    """The core of a decode worker."""

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
        eos_token_ids: frozenset[int],
    ):
        self._config = config
        self._eos_token_ids = eos_token_ids
        self.memory = KvMemory(pages, config.page_size, config.radix_eviction_policy)
        self.host = PagePool(host_pages)
        self.counters = DecodeCounters()
        self._effects: list[Effect] = []
        self._arrivals = TransferQueue(self.memory, self.counters, self._effects)
        self._retraction = Retraction(
            self.memory, self.host, self.counters, self._effects, config.retract_steps, config.retractions_max
        )
        self.leases = LeaseTable(
            self.memory, holder, words, kv_format, config.lease_seconds, self.counters, self._effects
        )
        self._admission = Admission(config, self.memory, context_len, kv_format)
        self._audience = RouterSessions(config.load_seconds)
        self._number = 0
        self._reqs: dict[str, Req] = {}  # every live request, whatever its state
        self._batch = RunningBatch(self.memory, self.counters, config.max_running_requests)
        self._unsent = OutputBuffer(config.flush_seconds)
        self._departures = Migrations(
            self.memory, self._batch, self.leases, self._unsent, self.counters, self._effects
        )
        self._dropped: list[Req] = []  # cancelled while their pages are being copied

    # ---- what comes in ----

    def on_link(self, event: LinkEvent, now: float) -> None:
        """A router came, went, or sent a command."""
        match event:
            case PeerUp(peer, _):
                self._effects.extend(self._audience.join(peer))
            case PeerDown(peer, _):
                self._audience.leave(peer)
                self._unsent.forget(peer)
                self.leases.forget_router(peer)
                for req in [req for req in self._reqs.values() if req.router == peer]:
                    self._drop(req)
            case Received(peer, Decode() as command):
                self._intake(peer, command, now)
            case Received(_, Migrate(rid, attempt)):
                self._departures.ask(self._reqs.get(rid), attempt)
            case Received(_, Renew() | Release() as command):
                self.leases.on_command(command, now)
            case Received(_, Cancel(rid, attempt)):
                self._cancel(rid, attempt)
            case Received(peer, DrainAck()):
                self._audience.dismiss(peer)
            case Received(peer, message):
                raise InvariantError(f"a decode worker got {type(message).__name__} from {peer}")

    def on_fetch(self, event: FetchEvent, now: float) -> None:
        """A fetch landed, went stale, failed or was proven to have ended."""
        del now
        match self._arrivals.on_fetch(event):
            case Transferred() as arrived:
                self._join(arrived)
            case NotTransferred(req, stale, detail):
                self._refuse(req, "stale" if stale else "unreachable", detail)

    def on_copy(self, copy_id: int, now: float) -> None:
        """Pages are in host memory, or back from it."""
        del now
        restored = self._retraction.on_copy(copy_id)
        if restored is not None:
            self._batch.join(restored)
        dropped, self._dropped = self._dropped, []
        for req in dropped:
            self._drop(req)

    def tick(self, now: float) -> None:
        """Send the tokens that have waited long enough; end the leases nobody renewed; tell the load."""
        self.leases.expire(now)
        if self._unsent.due(now):
            self._flush(now)
        if self._audience.due(now):
            self._effects.extend(self._audience.push(self._load(), now))

    def leave(self) -> None:
        """Take nothing new; what is here goes on until the routers have it moved, or it ends."""
        self._effects.extend(self._audience.take_leave())

    def reclaim(self, completed_step: int) -> None:
        """The device has completed all steps up to `completed_step`."""
        self.memory.pool.reclaim(completed_step)

    # ---- steps ----

    def settles_first(self) -> bool:
        """A DECODE step needs nothing that only the CPU knows about the one before."""
        return False

    def plan(self, now: float) -> ScheduleBatch | None:
        """The next step: those whose KV has arrived join first, else everybody decodes one token."""
        self._resume()
        self._admit_waiting()
        if self._batch.joining:
            return self._batch.prebuilt()
        self._departures.take_out()
        self._let_depart(now)
        self._make_room_ahead(now)
        batch = self._batch.decode()
        if batch is None:
            self._send_back_stranded(now)
        else:
            self._admission.ratio.decay()
        return batch

    def settle(self, batch: ScheduleBatch, token_ids: list[int], now: float) -> None:
        """Append what the step sampled, end the requests that are done, tell the routers."""
        finished: list[Send] = []
        for req, token_id in zip(self._batch.settle(batch.step), token_ids, strict=True):
            if self._reqs.get(req.rid) is not req:
                self.counters.extra_tokens += 1
                continue
            req.token_ids.append(token_id)
            req.kv_len += 1
            self.counters.generated_tokens += 1
            self._unsent.add(req.router, Row(req.rid, req.attempt, req.output_len - 1, (token_id,)))
            if reason := req.finish_reason(self._eos_token_ids):
                message = Finished(req.rid, req.attempt, req.output_len, reason, req.retractions)
                finished.append(Send(req.router, message))
                self._finish(req)
        if finished or self._unsent.due(now):
            self._flush(now)
        self._effects.extend(finished)
        self._let_depart(now)
        self._send_back(now)

    # ---- what goes out ----

    def drain(self) -> list[Effect]:
        """What is to be done, in order."""
        effects = list(self._effects)
        self._effects.clear()
        return effects

    def next_deadline(self) -> float | None:
        """When unsent tokens have waited long enough, a lease ends, or the routers should hear of a new load."""
        others = (self._unsent.deadline(), self.leases.next_expiry())
        deadlines = (*others, self._audience.deadline(self._load()))
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def awaits_transfer(self) -> bool:
        """Whether a fetch or a copy will report."""
        return self._arrivals.in_flight or self._retraction.copying

    @property
    def slots_used(self) -> int:
        """Requests in slots."""
        return self._batch.slots_used

    @property
    def leases_held(self) -> int:
        """Leases that live."""
        return len(self.leases)

    @property
    def empty(self) -> bool:
        """Whether nothing here is anybody's any more, and nothing is on the way."""
        return self._audience.dismissed and not (self._reqs or self.leases or self._unsent)

    def check(self) -> None:
        """Prove that pages, locks and slots are accounted for; raises `InvariantError`."""
        self.memory.check()
        self.host.check()
        in_slots = [req.rid for req in self._reqs.values() if req.slot is not None]
        if len(in_slots) != self.slots_used:
            raise InvariantError(f"{in_slots} hold slots, but {self.slots_used} are used")
        owned = sum(len(req.owned) for req in [*self._reqs.values(), *self.leases.reqs])
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
        self._cancel(command.rid, command.attempt - 1)
        present = self._reqs.get(command.rid)
        if present is not None and present.attempt >= command.attempt:
            return  # the same attempt or a newer one is here already
        self._number += 1
        self.counters.requests += 1
        req = Req.of(command, router, self._number, now)
        problem = self._admission.never_fits(req, command.baton)
        if problem is None and present is not None:
            problem = "no_room", "the pages of an older attempt are still being copied"
        if problem is None and self._audience.left:
            problem = "no_room", "this worker is leaving"
        if problem is not None:
            self._refuse(req, *problem)
            return
        self._reqs[req.rid] = req
        if not self._arrivals.wait(req, command.baton):
            self._admit(req, command.baton)

    def _admit_waiting(self) -> None:
        """They may wait again, for more of their prefix; after a fetch that did not land, each fetches for itself."""
        for req, baton, landed in self._arrivals.take_waiting():
            if not (landed and self._arrivals.wait(req, baton)):
                self._admit(req, baton)

    def _admit(self, req: Req, baton: Baton) -> None:
        """Start fetching what is not cached here, or refuse."""
        self.memory.match(req, baton.kv_len)
        missing = self.memory.pages_for(baton.kv_len) - len(req.pages)
        open_now = bool(self._batch.free_slots) and not self._retraction.pressed
        others = self._batch.reqs, self._arrivals.requests
        if not (open_now and self._admission.has_room(req, missing, *others)):
            self.counters.no_room += 1
            self.memory.release(req)
            self._refuse(req, "no_room", "")
            return
        self._batch.take_slot(req)
        if arrived := self._arrivals.start(req, baton):
            self._join(arrived)

    def _join(self, arrived: Transferred) -> None:
        req = arrived.req
        self._batch.join(req)
        self.counters.transfer_seconds.append(arrived.fetch_seconds)
        self._effects.append(Send(req.router, arrived.joined))

    def _refuse(self, req: Req, reason: RefusalReason, detail: str) -> None:
        """Tell the router; the request holds no pages any more."""
        self.counters.refused += 1
        self._forget(req)
        self._effects.append(Send(req.router, Refused(req.rid, req.attempt, reason, detail)))

    def _cancel(self, rid: str, attempt: int) -> None:
        self.counters.cancelled += self.leases.cancel(rid, attempt)
        req = self._reqs.get(rid)
        if req is not None and req.attempt <= attempt:
            self.counters.cancelled += 1
            self._drop(req)

    def _drop(self, req: Req) -> None:
        """Give up everything the request holds, in whatever state it is."""
        if self._retraction.is_copying(req):
            if req not in self._dropped:
                self._dropped.append(req)  # again when the copy has ended
            return
        if req in self._batch.joining or self._departures.forget(req):
            self.memory.release(req)
        elif self._batch.runs(req):
            self.memory.commit(req)
            self.memory.release(req)
        elif not self._arrivals.abandon(req) and not self._retraction.drop(req):
            raise InvariantError(f"request {req.rid} is in no state that can be dropped")
        self._forget(req)

    def _finish(self, req: Req) -> None:
        self.counters.finished += 1
        if self._batch.runs(req) or self._departures.forget(req):
            self.memory.commit(req)
            self.memory.release(req)
        elif not self._retraction.drop(req):  # it ended with the very step it was retracted at
            raise InvariantError(f"request {req.rid} finished, but neither runs nor leaves")
        self._forget(req)

    def _let_depart(self, now: float) -> None:
        for req in self._departures.lend_settled(now):
            self._forget(req)

    def _forget(self, req: Req) -> None:
        if self._reqs.get(req.rid) is req:
            del self._reqs[req.rid]
        self._departures.forget(req)
        self._batch.leave(req)
        if not self._reqs:
            self._admission.reset()

    # ---- room ----

    def _make_room_ahead(self, now: float) -> None:
        victims = self._retraction.step_back(list(self._batch.running.values()))
        for victim in victims:
            self._batch.leave(victim)
        if victims:
            self._admission.after_retraction(list(self._batch.running.values()))
            self._send_back(now)

    def _send_back(self, now: float) -> None:
        """Start the backups whose requests have settled; without host memory another attempt recomputes."""
        for req in self._retraction.advance():
            self.memory.commit(req)
            self.memory.release(req)
            self._flush(now)  # its last tokens, before the router forgets the attempt
            self._refuse(req, "stale", "retracted, and host memory had no room for its pages")

    def _send_back_stranded(self, now: float) -> None:
        """When nothing is under way that gives pages back, whoever lacks some waits for a quarantine to end,
        perhaps for ever: another worker goes on."""
        retiring = self.memory.pool.count(PageState.RETIRING)
        arriving = self._arrivals.requests
        if self._batch.in_flight or retiring or self._batch.joining or arriving or self._retraction.copying:
            return
        req = next(iter(self._batch.running.values()), None)
        if req is not None:
            self.memory.commit(req)
            self.memory.release(req)
        else:
            req = self._retraction.drop_first()
        if req is not None:
            self.counters.returned_to_router += 1
            self._flush(now)
            self._refuse(req, "no_room", "the pages it needs are in quarantine")

    def _resume(self) -> None:
        while self._batch.free_slots and (req := self._retraction.resume(self._batch.reqs)):
            self._batch.take_slot(req)

    def _flush(self, now: float) -> None:
        self._effects.extend(self._unsent.flush(now))

    def _load(self) -> Load:
        in_slots = [*self._batch.reqs, *self._arrivals.requests]
        return Load(
            queued=len(self._retraction.requests) + self._arrivals.waiting,
            running=len(in_slots),
            running_tokens=sum(len(req.token_ids) for req in in_slots),
            free_pages=self.memory.room,
            slots_free=max(0, self._batch.free_slots - self._arrivals.waiting),
            accepting=not self._retraction.pressed,
        )

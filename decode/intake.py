"""Takes requests in: what of one is not cached is fetched or computed here, or another one's fetch brings it.

    Decode ─► refused, waiting for the fetch of another, or its own fetch starts ─► joins when all pages are here
    Serve ──► refused, or its prompt is computed here (`decode/local_prompts.py`)

`Admission` has the rules; this puts the requests that are here to them. Only a request without pages is refused for
lack of slots and pages: one whose pages have landed always joins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from decode.admission import Admission
from decode.counters import DecodeCounters
from decode.endings import Endings
from decode.lifecycle import TRANSITIONS, DecodeEvent, DecodeState
from decode.local_prompts import LocalPrompts
from decode.retraction import Retraction
from decode.running_batch import RunningBatch
from decode.transfer_queue import TransferQueue, Transferred
from shared.batch.effects import Send, WorkerEffect
from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.scheduling.request_states import RequestStates
from shared.scheduling.router_sessions import RouterSessions
from shared.wire.baton import Baton
from shared.wire.messages import Decode, Serve


@dataclass(slots=True)
class Intake:
    """How requests come in. `now` in seconds."""

    memory: KvMemory
    states: RequestStates[DecodeState, DecodeEvent]
    counters: DecodeCounters
    effects: list[WorkerEffect]
    sessions: RouterSessions
    admission: Admission
    batch: RunningBatch
    transfer_queue: TransferQueue
    prompts: LocalPrompts
    retraction: Retraction
    endings: Endings
    _sequence: int = 0  # of the last request that came

    def take_prefilled(self, router: str, command: Decode, now: float) -> None:
        """A request whose pages another worker leases to this one."""
        req = self._take_in(router, command, now)
        if req is not None and not self.transfer_queue.wait(req, command.baton):
            self.admit(req, command.baton, now)

    def take_prompt(self, router: str, command: Serve, now: float) -> None:
        """A request whose prompt is to be computed here."""
        req = self._take_in(router, command, now)
        if req is not None:
            self.start_prompt(req)

    def admit_waiting(self, now: float) -> None:
        """Try again the requests whose awaited fetch has ended.

        They may wait again, for more of their prefix. After a fetch that did not land, each fetches for itself.
        """
        for req, baton, landed in self.transfer_queue.take_waiting():
            if not (landed and self.transfer_queue.wait(req, baton)):
                self.admit(req, baton, now)

    def admit(self, req: Req, baton: Baton, now: float) -> None:
        """Start fetching what is not cached here, or refuse."""
        missing = self._find_room(req, baton.kv_len, baton.kv_len)
        if missing is not None and (arrived := self.transfer_queue.start(req, baton, now)):
            self.join(arrived)

    def start_prompt(self, req: Req) -> None:
        """Start to compute what is not cached here, or refuse."""
        missing = self._find_room(req, req.reusable_len, len(req.token_ids))
        if missing is None:
            return
        self.memory.allocate(req, missing)
        self.admission.on_landed(req)
        self.states.advance(req, DecodeEvent.EXTEND_STARTED)
        self.prompts.start(req, samples=True)

    def join(self, arrived: Transferred) -> None:
        """All pages of the request are here: it decodes from the next step on."""
        req = arrived.req
        self.batch.join(req)
        self.admission.on_landed(req)
        self.counters.transfer_seconds.append(arrived.fetch_seconds)
        self.effects.append(Send(req.router, arrived.joined))

    def _take_in(self, router: str, command: Decode | Serve, now: float) -> Req | None:
        """The request, which is here from now on; None if it is already, or is refused."""
        self.endings.cancel(command.rid, command.attempt - 1)
        present = self.endings.reqs.get(command.rid)
        if present is not None and present.attempt >= command.attempt:
            return None  # the same attempt or a newer one is here already
        self._sequence += 1
        self.counters.requests += 1
        req = Req.of(command, router, self._sequence, now, TRANSITIONS.start)
        problem = self.admission.never_fits(command)
        if problem is None and present is not None:
            problem = "no_room", "the pages of an older attempt are still being copied"
        if problem is None and self.sessions.draining:
            problem = "no_room", "this worker is draining"
        if problem is not None:
            self.endings.refuse(req, DecodeEvent.REFUSED, *problem)
            return None
        self.endings.reqs[req.rid] = req
        return req

    def _find_room(self, req: Req, cached_len_max: int, kv_len: int) -> int | None:
        """Take a slot for `kv_len` tokens, of which the cache may give so many, or refuse.

        Returns how many pages the request misses, which are free now; None if it is refused.
        """
        self.memory.match(req, cached_len_max)
        missing = self.memory.pages_for(kv_len) - len(req.pages)
        if not self._has_slot_and_pages(req, missing):
            self._refuse_for_room(req)
            return None
        self._take_slot(req)
        return missing

    def _has_slot_and_pages(self, req: Req, missing: int) -> bool:
        """Whether the request may come in. Its `missing` pages, beside those that it has locked, are free then."""
        others = self.batch.running or self.batch.joining or self.prompts.served
        alone = not (others or self.transfer_queue.transferring)
        is_below_share = partial(self.admission.is_below_share, req)  # most are not asked
        has_slot = self.admission.has_slot(
            is_below_share,
            self.batch.free_slots,
            alone=alone,
            retracting=self.retraction.active,
            backfilled=self.retraction.backfilled,
        )
        pages_arriving = self.transfer_queue.pages_held_with(req)
        return has_slot and self.admission.free_pages_for(
            req, is_below_share, missing, pages_arriving, alone=alone
        )

    def _take_slot(self, req: Req) -> None:
        self.batch.take_slot(req)
        self.admission.on_admitted(req)
        self.retraction.on_admitted()

    def _refuse_for_room(self, req: Req) -> None:
        self.counters.no_room += 1
        self.memory.release(req)
        self.endings.refuse(req, DecodeEvent.REFUSED, "no_room", "")

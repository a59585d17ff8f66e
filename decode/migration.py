"""Requests that continue on another worker: from the router's `Migrate` until their pages are leased.

    Migrate ─► running ─► migrating (its step in flight settles) ─► leased, `Migrating` is sent
                              └─ may still finish
            ─► extending (its first token settles) ─► leased, `Prefilled` is sent with a baton

`Migrate` may come while the pages of a request are being fetched or restored: it then migrates as soon as it runs. One
whose prompt is computed here leaves with its first token, and has no row here. One that ends by length with the step in
flight, or is cancelled, never migrates.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decode.counters import DecodeCounters
from decode.lifecycle import ENDED, DecodeEvent, DecodeState
from decode.output_buffer import OutputBuffer
from decode.running_batch import RunningBatch
from shared.batch.effects import Send, WorkerEffect
from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.kv.leases import LeaseTable
from shared.scheduling.request_states import RequestStates
from shared.wire.baton import Baton
from shared.wire.messages import Migrating


@dataclass(slots=True)
class Migrations:
    """Takes migrating requests out of the batch, and leases their pages once their last step has settled."""

    memory: KvMemory
    batch: RunningBatch
    leases: LeaseTable
    output_buffer: OutputBuffer
    states: RequestStates[DecodeState, DecodeEvent]
    counters: DecodeCounters
    effects: list[WorkerEffect]
    settling: list[Req] = field(default_factory=list)
    _asked: list[Req] = field(default_factory=list)

    def ask(self, req: Req) -> None:
        """The request is to continue on another worker as soon as it runs."""
        if req not in self._asked:
            self._asked.append(req)

    @property
    def without_pages(self) -> list[Req]:
        """Requests to migrate that would have to be computed again first: another worker had better do so."""
        return [req for req in self._asked if req.state in (DecodeState.QUEUED, DecodeState.EXTENDING)]

    def hand_over(self, req: Req, now: float) -> Baton | None:
        """Lease the pages of a prompt whose first token has settled; None: it is not to leave, or no word is free."""
        if req not in self._asked or self.leases.free <= len(self.settling):
            return None
        self._asked.remove(req)
        baton = self.leases.grant(req, now)
        self.states.advance(req, DecodeEvent.LEASED)
        self.counters.migrations += 1
        return baton

    def start(self) -> None:
        """Take the requests to migrate out of the batch, at most as many as there are free lease words."""
        if not self._asked:
            return  # as nearly always
        self._asked = [req for req in self._asked if req.state not in ENDED]
        running = [req for req in self._asked if req.state is DecodeState.RUNNING]
        going = [req for req in running if req.launched_len < req.final_kv_len]
        for req in going[: self.leases.free - len(self.settling)]:
            self.states.advance(req, DecodeEvent.MIGRATION_STARTED)
            self._asked.remove(req)
            self.batch.remove(req)
            self.settling.append(req)

    def lease_settled(self, now: float) -> list[Req]:
        """Lease the pages of those whose last step has settled; returns them: they run here no more."""
        if not self.settling:
            return []  # as nearly always
        settled = [req for req in self.settling if req.launched_len == req.kv_len]
        # The router counts the tokens when it hears of the migration.
        self.effects.extend(self.output_buffer.flush_of(settled))
        for req in settled:
            self.settling.remove(req)
            self.memory.commit(req)
            baton = self.leases.grant(req, now)
            self.states.advance(req, DecodeEvent.LEASED)
            self.counters.migrations += 1
            self.effects.append(Send(req.router, Migrating(req.rid, req.attempt, req.output_len, baton)))
        return settled

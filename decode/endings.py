"""How requests of a decode worker end: what each gives back in its state, and what its router is told.

    finish    its last token is sampled               drop               its client, router or session is gone
    fail      nothing can follow                      return_to_router   another worker continues it
    refuse    it holds nothing                        put_back           a stream needs the pages of its prompt

A request holds what the part keeps that has it (`docs/request-life.md`). Its whole settled pages stay in the radix
cache. A request whose pages are being copied ends with the copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decode.admission import Admission
from decode.counters import DecodeCounters
from decode.lifecycle import ENDED, DecodeEvent, DecodeState
from decode.local_prompts import LocalPrompts
from decode.migration import Migrations
from decode.output_buffer import OutputBuffer
from decode.retraction import Retraction
from decode.running_batch import RunningBatch
from decode.transfer_queue import TransferQueue
from shared.batch.effects import Send, WorkerEffect
from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.kv.leases import LeaseTable
from shared.primitives.errors import InvariantError
from shared.scheduling.request_states import RequestStates
from shared.scheduling.router_sessions import RouterSessions
from shared.wire.messages import Finished, FinishReason, RefusalReason, Refused


@dataclass(slots=True)
class Endings:
    """The requests that are here and not leased, and their ends. `now` in seconds."""

    memory: KvMemory
    states: RequestStates[DecodeState, DecodeEvent]
    counters: DecodeCounters
    effects: list[WorkerEffect]
    sessions: RouterSessions
    leases: LeaseTable
    admission: Admission
    output_buffer: OutputBuffer
    batch: RunningBatch
    transfer_queue: TransferQueue
    prompts: LocalPrompts
    retraction: Retraction
    migrations: Migrations
    reqs: dict[str, Req] = field(default_factory=dict)  # by rid

    def cancel(self, rid: str, attempt: int) -> None:
        """Drop the request, whatever its state, if it is of this attempt or an older one."""
        self.counters.cancelled += self.leases.cancel(rid, attempt)
        req = self.reqs.get(rid)
        if req is not None and req.attempt <= attempt:
            self.counters.cancelled += 1
            self.drop(req)

    def drop(self, req: Req) -> None:
        """Cancel the request. While its pages are copied, it ends with the copy."""
        match req.state:
            case DecodeState.BACKING_UP | DecodeState.RESTORING:
                self.states.advance(req, DecodeEvent.CANCELLED)
            case DecodeState.ABORTING:
                pass
            case _:
                self.release(req)
                self.end(req, DecodeEvent.CANCELLED)

    def finish(self, req: Req, reason: FinishReason, now: float) -> Send:
        """End a request whose last token is sampled; the same step may have taken it out of the batch."""
        message = Finished(req.rid, req.attempt, req.output_len, reason, req.retractions)
        self.end_finished(req, now)
        return Send(req.router, message)

    def end_finished(self, req: Req, now: float) -> None:
        """End a request whose router knows its last token."""
        self.counters.finished += 1
        self.admission.on_end(req)
        self.admission.returned.add(self.memory.releasable_pages(req), now)
        self.release(req)
        self.end(req, DecodeEvent.FINISHED)

    def fail(self, req: Req, why: str) -> None:
        """End a request that cannot go on here or elsewhere, behind the tokens that it has, if it has not ended."""
        if req.state in ENDED:
            return
        self.effects.extend(self.output_buffer.flush_of([req]))
        self.sessions.fail(req, why)
        self.release(req)
        self.end(req, DecodeEvent.FAILED)

    def return_to_router(self, req: Req, event: DecodeEvent, reason: RefusalReason, detail: str) -> None:
        """End a request that has tokens here; another worker continues it."""
        self.counters.returned_to_router += 1
        self.release(req)
        self.effects.extend(self.output_buffer.flush_of([req]))  # before the router forgets the attempt
        self.refuse(req, event, reason, detail)

    def put_back(self, req: Req) -> None:
        """Return a prompt, since a stream needs its pages; what is computed of it stays in the radix cache."""
        self.counters.put_back += 1
        self.retraction.on_put_back()
        self.release(req)
        self.refuse(req, DecodeEvent.PUT_BACK, "no_room", "a stream needs the pages of this prompt")

    def refuse(self, req: Req, event: DecodeEvent, reason: RefusalReason, detail: str) -> None:
        """Return a request that holds no pages any more to its router."""
        self.counters.refused += 1
        self.end(req, event)
        self.effects.append(Send(req.router, Refused(req.rid, req.attempt, reason, detail)))

    def end(self, req: Req, event: DecodeEvent) -> None:
        """Take the last step of a request that holds no pages any more."""
        self.states.advance(req, event)
        self.forget(req)

    def forget(self, req: Req) -> None:
        """Take out a request that has ended, or that is leased from now on."""
        if self.reqs.get(req.rid) is req:
            del self.reqs[req.rid]
        if req.slot is not None:
            self.admission.on_change()
        self.batch.remove(req)
        if not self.reqs:
            self.admission.reset()

    def release(self, req: Req) -> None:
        """Release the resources that the request holds in its state; its whole settled pages stay in the radix cache.

        Not for one whose pages are being copied: it ends with the copy. Its slot is the batch's to free.
        """
        match req.state:
            case DecodeState.WAITING:
                self.transfer_queue.stop_waiting(req)
            case DecodeState.TRANSFERRING:
                self.transfer_queue.abandon(req)
            case DecodeState.JOINING:
                self.memory.release(req)
            case DecodeState.RUNNING:
                self._release_computed(req)
            case DecodeState.MIGRATING:
                self.migrations.settling.remove(req)
                self._release_computed(req)
            case DecodeState.RETRACTING:
                self.retraction.settling.remove(req)
                self._release_computed(req)
            case DecodeState.RETRACTED | DecodeState.QUEUED:
                self.retraction.drop(req)
            case DecodeState.EXTENDING:
                self.prompts.leave(req)
                self._release_computed(req)
            case state:
                raise InvariantError(f"request {req.rid} cannot give up what it holds: it is {state}")

    def _release_computed(self, req: Req) -> None:
        self.memory.commit(req)
        self.memory.release(req)

"""What a request holds in each of its states, who keeps it there, and how it is given up.

Where is a request on this worker? `Req.state` says it, and `kept` names the part that keeps requests of that state.
`check` proves that the two agree, and that pages and slots agree with the requests. This file decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from decode.lifecycle import DecodeState
from decode.migration import Migrations
from decode.retraction import Retraction
from decode.running_batch import RunningBatch
from decode.transfer_queue import TransferQueue
from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.kv.leases import LeaseTable
from shared.kv.page_pool import PageState
from shared.primitives.errors import InvariantError
from shared.scheduling.request_states import check_states


@dataclass(frozen=True, slots=True)
class Holdings:
    """The parts of a decode scheduler, each of which keeps the requests of some states."""

    memory: KvMemory
    leases: LeaseTable
    transfer_queue: TransferQueue
    batch: RunningBatch
    retraction: Retraction
    migrations: Migrations

    def give_up(self, req: Req) -> None:
        """Give up what the request holds in its state; its whole settled pages stay in the radix cache.

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
            case DecodeState.RETRACTED:
                self.retraction.drop(req)
            case state:
                raise InvariantError(f"request {req.rid} cannot give up what it holds: it is {state}")

    def kept(self) -> Mapping[DecodeState, Iterable[Req]]:
        """The requests that the parts keep, by the state in which they keep them."""
        return {
            DecodeState.WAITING: self.transfer_queue.waiting,
            DecodeState.TRANSFERRING: self.transfer_queue.transferring,
            DecodeState.JOINING: self.batch.joining,
            DecodeState.RUNNING: self.batch.running.values(),
            DecodeState.MIGRATING: self.migrations.settling,
            DecodeState.LEASED: self.leases.reqs,
            DecodeState.RETRACTING: self.retraction.settling,
            **self.retraction.copied,
            DecodeState.RETRACTED: self.retraction.retracted,
        }

    def check(self, reqs: Sequence[Req]) -> None:
        """Prove that states, pages and slots of all requests that are here agree; raises `InvariantError`."""
        check_states(self.kept(), reqs)
        in_slots = [req.rid for req in reqs if req.slot is not None]
        if len(in_slots) != self.batch.slots_used:
            raise InvariantError(f"{in_slots} hold slots, but {self.batch.slots_used} are used")
        owned = sum(len(req.owned) for req in reqs)
        states = PageState.OWNED, PageState.ARRIVING, PageState.COPYING
        held = sum(self.memory.pool.count(state) for state in states)
        if owned != held:
            raise InvariantError(f"{[req.rid for req in reqs]} own {owned} pages, but {held} are owned")

    def _release_computed(self, req: Req) -> None:
        self.memory.commit(req)
        self.memory.release(req)

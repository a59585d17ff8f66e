"""Room on a decode worker: who may have a slot and pages now, who must give them back, and what the routers are told.

    new request ─► admits? ──────────┐
    retracted request ─► resume ─────┼─► slots of the batch, pages of the pool
    running requests grow ─► grow ───┘      └─ too few: retracted; nothing can free any: stuck

`Admission` and `Retraction` hold the rules; this puts to them all requests that are here. It ends no request.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from decode.admission import Admission
from decode.retraction import Retraction
from decode.running_batch import RunningBatch
from decode.transfer_queue import TransferQueue
from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.kv.page_pool import PageState
from shared.wire.messages import Load


@dataclass(frozen=True, slots=True)
class Room:
    """The slots and pages of one worker, and the requests that share them."""

    memory: KvMemory
    admission: Admission
    transfer_queue: TransferQueue
    batch: RunningBatch
    retraction: Retraction

    def admits(self, req: Req, missing: int) -> bool:
        """Whether a new request may come in. Its `missing` pages, beside those that it has locked, are free then."""
        settled, transferring = self.batch.reqs, self.transfer_queue.transferring
        present = [*settled, *transferring]
        is_light = partial(self.admission.is_light, req, present)  # most are not asked
        has_slot = self.admission.has_slot(
            is_light,
            self.batch.free_slots,
            alone=not present,
            retracting=self.retraction.active,
            overtaken_by=self.retraction.overtaken_by,
        )
        pages_arriving = self.transfer_queue.pages_held_with(req)
        return has_slot and self.admission.make_room_for(
            req, is_light, missing, settled, transferring, pages_arriving
        )

    def resume(self) -> None:
        """Give slots to the retracted requests whose pages fit again."""
        while self._may_resume() and (req := self.retraction.resume(self.batch.reqs)):
            self.batch.take_slot(req)

    def grow(self) -> bool:
        """Retract running requests until the next steps of the others fit; whether any was retracted."""
        victims = self.retraction.retract_until_fits(self.batch.running.values())
        for victim in victims:
            self.batch.remove(victim)
        if victims:
            self.admission.after_retraction(list(self.batch.running.values()))
        return bool(victims)

    def stuck(self) -> Req | None:
        """One request to give up, if no step, copy or fetch can free pages and only the end of a quarantine could."""
        retiring = self.memory.pool.count(PageState.RETIRING)
        if self.batch.in_flight or retiring or self.transfer_queue.transferring or self.retraction.copying:
            return None
        return next(iter([*self.batch.running.values(), *self.retraction.retracted]), None)

    def load(self) -> Load:
        """What the routers are told."""
        in_slots = [*self.batch.reqs, *self.transfer_queue.transferring]
        waiting = len(self.transfer_queue.waiting)
        return Load(
            queued=self.retraction.count + waiting,
            running=len(in_slots),
            running_tokens=sum(len(req.token_ids) for req in in_slots),
            free_pages=self.memory.available_pages,
            slots_free=max(0, self.batch.free_slots - waiting),
            accepting=not self.retraction.active,
        )

    def _may_resume(self) -> bool:
        kept = self.admission.slots_kept if self.batch.slots_used else 0
        return self.batch.free_slots > kept

"""Stands between the event loop and a scheduler and notes what happens, without changing it.

For two purposes: the report wants to know where requests were when they were cancelled, and the tests of the overlap
want the order of launches and settlements. The only file that looks into a scheduler's private books.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from decode.scheduler import DecodeScheduler
from prefill.scheduler import PrefillScheduler
from shared.effects import Effect
from shared.links.events import LinkEvent, PeerDown, Received
from shared.messages import Cancel
from shared.req import Req
from shared.schedule_batch import ScheduleBatch
from shared.transfer.protocol import FetchEvent


@dataclass(slots=True)
class Witness:
    """A `Scheduler` that asks another one."""

    scheduler: PrefillScheduler | DecodeScheduler
    count: Callable[[str], None]
    steps: list[str] = field(default_factory=list)  # "plan 7", "settle 6", "settles first", "nothing to plan"

    def on_link(self, event: LinkEvent, now: float) -> None:
        match event:
            case Received(_, Cancel(rid, _)):
                self.count(f"path cancelled while {self._where(rid)}")
            case PeerDown():
                for req in self.requests():
                    if req.router == event.peer:
                        self.count(f"path router lost while {self._where(req.rid)}")
        self.scheduler.on_link(event, now)

    def on_fetch(self, event: FetchEvent, now: float) -> None:
        self.scheduler.on_fetch(event, now)

    def on_copy(self, copy_id: int, now: float) -> None:
        self.scheduler.on_copy(copy_id, now)

    def tick(self, now: float) -> None:
        self.scheduler.tick(now)

    def reclaim(self, completed_step: int) -> None:
        self.scheduler.reclaim(completed_step)

    def settles_first(self) -> bool:
        first = self.scheduler.settles_first()
        if first:
            self.count("path settled before the next launch")
            self.steps.append("settles first")
        return first

    def plan(self, now: float) -> ScheduleBatch | None:
        batch = self.scheduler.plan(now)
        if isinstance(self.scheduler, PrefillScheduler) and self.scheduler._in_batch_prefix._put_off:
            self.count("path put off for a prefix in the same batch")
        self.steps.append(f"plan {batch.step}" if batch else "nothing to plan")
        return batch

    def settle(self, batch: ScheduleBatch, token_ids: list[int], now: float) -> None:
        self.steps.append(f"settle {batch.step}")
        leaving, departing = self._leaving(), self._departing()
        self.scheduler.settle(batch, token_ids, now)
        for where, reqs in (("leaving", leaving), ("departing", departing)):
            if any(req not in self.requests() for req in reqs):
                self.count(f"path finished while {where}")

    def take_effects(self) -> list[Effect]:
        return self.scheduler.take_effects()

    def next_deadline(self) -> float | None:
        return self.scheduler.next_deadline()

    def awaits_transfer(self) -> bool:
        return self.scheduler.awaits_transfer()

    def check(self) -> None:
        self.scheduler.check()

    def requests(self) -> list[Req]:
        """Every request that the scheduler knows, whatever its state."""
        if isinstance(self.scheduler, DecodeScheduler):
            return [*self.scheduler._reqs.values(), *self.scheduler.leases.reqs]
        own = [*self.scheduler._waiting.values(), *self.scheduler._running.values()]
        return [*own, *self.scheduler.leases.reqs]

    def _leaving(self) -> list[Req]:
        if isinstance(self.scheduler, DecodeScheduler):
            return list(self.scheduler._retraction._leaving)
        return []

    def _departing(self) -> list[Req]:
        if isinstance(self.scheduler, DecodeScheduler):
            return list(self.scheduler._migrations._departing)
        return []

    def _where(self, rid: str) -> str:
        if isinstance(self.scheduler, DecodeScheduler):
            return _in_decode(self.scheduler, rid)
        return _in_prefill(self.scheduler, rid)


def _in_prefill(scheduler: PrefillScheduler, rid: str) -> str:
    if rid in scheduler._waiting:
        return "queued for prefill"
    if scheduler._chunked is not None and scheduler._chunked.rid == rid:
        return "chunked"
    if rid in scheduler._running:
        return "in flight in prefill"
    return "leased" if scheduler.leases.find(rid) else "gone from prefill"


def _in_decode(scheduler: DecodeScheduler, rid: str) -> str:
    req = scheduler._reqs.get(rid)
    if req is None:
        return "lent by decode" if scheduler.leases.find(rid) else "gone from decode"
    if req in scheduler._transfer_queue.requests:
        return "arriving"
    if any(entry[0] is req for entry in scheduler._transfer_queue._waiting):
        return "waiting for a prefix"
    if req in scheduler._batch.joining:
        return "joining"
    if scheduler._batch.runs(req):
        return "in flight in decode" if req.launched_len > req.kv_len else "between steps"
    if scheduler._retraction.is_copying(req):
        return "copied"
    return "leaving" if req in scheduler._retraction._leaving else "retracted"

"""Stands between the event loop and a scheduler and notes what happens, without changing it.

The report counts the rows of the schedulers' tables. Two things are finer than a state, so they are noted here:
whether a running request that is cancelled has a row in the step in flight, and a command for a request that is gone.
The tests of the overlap want the order of launches and settlements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from decode.lifecycle import DecodeState
from decode.scheduler import DecodeScheduler
from prefill.scheduler import PrefillScheduler
from shared.batch.effects import WorkerEffect
from shared.batch.schedule_batch import ScheduleBatch
from shared.links.events import LinkEvent, PeerDown, Received
from shared.transfer.protocol import FetchEvent
from shared.wire.messages import Cancel
from shared.wire.sampled import Sampled


@dataclass(slots=True)
class Witness:
    """A `Scheduler` that asks another one."""

    scheduler: PrefillScheduler | DecodeScheduler
    count: Callable[[str], None]
    steps: list[str] = field(default_factory=list)  # "plan 7", "settle 6", "settles first", "nothing to plan"
    quiet: bool = False  # nothing has come, gone or been planned since the books were proven
    _planned: int = 0
    _settled: int = 0

    def on_link(self, event: LinkEvent, now: float) -> None:
        if self.steps[-2:-1] == ["settles first"]:
            self.count("path heard before the launch that waited for a settlement")
        match event:
            case Received(_, Cancel(rid, _)):
                self.count(f"path cancelled while {self._where(rid)}")
            case PeerDown():
                for req in self.scheduler.requests:
                    if req.router == event.peer:
                        self.count(f"path router lost while {self._where(req.rid)}")
        self.quiet = False
        self.scheduler.on_link(event, now)

    def on_fetch(self, event: FetchEvent, now: float) -> None:
        self.quiet = False
        self.scheduler.on_fetch(event, now)

    def on_copy(self, copy_id: int, now: float) -> None:
        self.quiet = False
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
        if self._planned > self._settled and self.scheduler.settles_first():
            self.count("path launched behind a step that should settle first")
        batch = self.scheduler.plan(now)
        if isinstance(self.scheduler, PrefillScheduler) and self.scheduler.waiting.put_off:
            self.count("path put off for a prefix in the same batch")
        self._planned += batch is not None
        self.quiet = self.quiet and batch is None
        if isinstance(self.scheduler, DecodeScheduler) and batch and batch.joins:
            self.count(f"path joined in {batch.mode.name}")
        self.steps.append(f"plan {batch.step}" if batch else "nothing to plan")
        return batch

    def settle(self, batch: ScheduleBatch, sampled: Sampled, now: float) -> None:
        self.steps.append(f"settle {batch.step}")
        self._settled += 1
        if sampled.sat_out and isinstance(self.scheduler, DecodeScheduler):
            rows = self.scheduler._batch._planned[batch.step]
            for row in sampled.sat_out:
                self.count(f"path sat out while {rows[row].state}")
        self.quiet = False
        self.scheduler.settle(batch, sampled, now)

    def take_effects(self) -> list[WorkerEffect]:
        effects = self.scheduler.take_effects()
        self.quiet = self.quiet and not effects
        return effects

    def next_deadline(self) -> float | None:
        return self.scheduler.next_deadline()

    def awaits_transfer(self) -> bool:
        return self.scheduler.awaits_transfer()

    def check(self) -> None:
        self.scheduler.check()

    def check_unless_quiet(self) -> None:
        """Prove the books after half a turn. Whatever a turn broke is still broken after the next that is not quiet."""
        if not self.quiet:
            self.scheduler.check()
            self.quiet = True

    def _where(self, rid: str) -> str:
        """The request's role and state, and for a running one whether the step in flight has a row of it."""
        role = "decode" if isinstance(self.scheduler, DecodeScheduler) else "prefill"
        req = next((req for req in self.scheduler.requests if req.rid == rid), None)
        if req is None or req.state is None:
            return f"gone from {role}"
        if req.state is DecodeState.RUNNING:
            return "in flight in decode" if req.launched_len > req.kv_len else "between steps"
        return f"{role} {req.state.value}"

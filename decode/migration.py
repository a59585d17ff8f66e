"""Requests that continue on another worker: from the router's `Move` until their pages are lent.

    asked ─► runs ─► departing (its step in flight settles) ─► lent, `Migrating` is told
                         └─ may still finish

Who is asked while its pages are on their way, here or back from host memory, departs as soon as it runs. One that
ends by length with the step in flight, or is cancelled, never departs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decode.counters import DecodeCounters
from decode.output_buffer import OutputBuffer
from decode.running_batch import RunningBatch
from shared.effects import Effect, Send
from shared.kv.kv_memory import KvMemory
from shared.kv.leases import LeaseTable
from shared.messages import Migrating
from shared.req import Req


@dataclass(slots=True)
class Migrations:
    """Who is to go, and who has left the batch and waits for its last step to settle."""

    memory: KvMemory
    batch: RunningBatch
    leases: LeaseTable
    output_buffer: OutputBuffer
    counters: DecodeCounters
    effects: list[Effect]
    _asked: list[Req] = field(default_factory=list)
    _departing: list[Req] = field(default_factory=list)

    def ask(self, req: Req | None, attempt: int) -> None:
        """The request, if it is still here with this attempt, is to continue elsewhere."""
        if req is None or req.attempt != attempt:
            return
        if req not in self._asked and req not in self._departing:
            self._asked.append(req)

    def take_out(self) -> None:
        """Who runs and was asked is in no step planned from now on, as far as there are lease words."""
        running = self.batch.running.values()
        going = [req for req in running if req in self._asked and req.launched_len < req.final_kv_len]
        for req in going[: self.leases.free - len(self._departing)]:
            self._asked.remove(req)
            self._departing.append(req)
            self.batch.leave(req)

    def lend_settled(self, now: float) -> list[Req]:
        """Lend those whose last step has settled; they are this worker's no more."""
        settled = [req for req in self._departing if req.launched_len == req.kv_len]
        if settled:
            self.effects.extend(
                self.output_buffer.flush(now)
            )  # the router counts the tokens when it hears of the move
        for req in settled:
            self._departing.remove(req)
            self.memory.commit(req)
            baton = self.leases.grant(req, now)
            self.counters.moves += 1
            self.effects.append(Send(req.router, Migrating(req.rid, req.attempt, req.output_len, baton)))
        return settled

    def forget(self, req: Req) -> bool:
        """The request has ended; whether it was departing."""
        if req in self._asked:
            self._asked.remove(req)
        if req in self._departing:
            self._departing.remove(req)
            return True
        return False

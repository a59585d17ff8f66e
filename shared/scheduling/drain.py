"""When a worker starts to drain and when its process may exit: the only place that decides it.

    serving ──SIGTERM──► draining ──nothing is left, or drain_seconds have passed──► exit
       └──SIGINT──────────► exit ◄──a second SIGTERM, or SIGINT──┘

The process's shell (`shared/worker/worker.py`) and the simulation ask it before every turn of the loop and do as
it says. Nothing must be left at two decisions in a row: then a router that came during the turn before has been heard,
and keeps no request on a worker that is gone. It knows nothing of signals, clocks or logs: the shell passes them in and
writes the notes that come back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, Protocol

from shared.batch.effects import Note


class DrainFacts(Protocol):
    """What the decision depends on; every scheduler implements it."""

    @property
    def drained(self) -> bool: ...
    @property
    def slots_used(self) -> int: ...
    @property
    def leases_held(self) -> int: ...


class DrainStep(enum.Enum):
    """What the shell does before the next turn of the loop."""

    CONTINUE = "continue"  # take the turn
    START_DRAINING = "start draining"  # become unready, tell the scheduler, then take the turn
    EXIT = "exit"  # take no further turn


@dataclass(frozen=True, slots=True)
class DrainDecision:
    """The step, and a line for the log where there is something to say."""

    step: DrainStep
    note: Note | None = None


_CONTINUE = DrainDecision(DrainStep.CONTINUE)


class WorkerDrain:
    """The drain of one worker. Times are seconds of one monotonic clock."""

    def __init__(self, drain_seconds: float):
        self._drain_seconds = drain_seconds
        self._deadline: float | None = None  # None: not asked to drain
        self._at_once = False
        self._started = False
        self._was_drained = False  # at the decision before

    def sigterm(self, now: float) -> None:
        """The process is asked to end: drain; when it is asked again, exit at once."""
        if self._deadline is not None:
            self._at_once = True
        else:
            self._deadline = now + self._drain_seconds

    def sigint(self) -> None:
        """Exit at once."""
        self._at_once = True

    @property
    def ends_at_once(self) -> bool:
        """Whether the next decision is to exit, whatever is left."""
        return self._at_once

    def decide(self, now: float, facts: DrainFacts) -> DrainDecision:
        """What to do before the next turn of the loop; asked before every turn until it says EXIT."""
        if self._at_once:  # whoever asked for that knows that what runs is cut
            return _exit(facts, "info")
        if self._deadline is None:
            return _CONTINUE
        if not self._started:
            self._started = True
            return DrainDecision(DrainStep.START_DRAINING, Note("worker.draining", _held(facts)))
        if (facts.drained and self._was_drained) or now >= self._deadline:
            return _exit(facts, "warning")
        self._was_drained = facts.drained
        return _CONTINUE


def _exit(facts: DrainFacts, level: Literal["info", "warning"]) -> DrainDecision:
    """`level`: of the note, where work is cut."""
    if facts.slots_used or facts.leases_held:
        return DrainDecision(DrainStep.EXIT, Note("worker.ended_with_work", _held(facts), level))
    return DrainDecision(DrainStep.EXIT, Note("worker.drained" if facts.drained else "worker.ended", {}))


def _held(facts: DrainFacts) -> dict[str, object]:
    return {"slots_used": facts.slots_used, "leases": facts.leases_held}

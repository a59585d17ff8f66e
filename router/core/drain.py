"""How a router ends: what each signal means, and when the process may exit. A core: no clock, signals or sockets.

    SIGTERM ─► lag: unready, answers close their connections; requests are still taken, until every proxy knows
            ─► draining: no listener; open answers go on, for `drain_seconds` at most
            ─► ended: nothing is open any more
    SIGINT, a second SIGTERM, or time over ─► ending: open answers get an error event ─► ended, within ENDING_SECONDS

`TRANSITIONS` is all of it. The HTTP server carries the steps out, and so do the routers of the simulation.
"""

from __future__ import annotations

import enum

from shared.batch.effects import Note
from shared.primitives.state_table import StateName, StateTable

LOOK_SECONDS = 0.1  # between two looks at what is still open
ENDING_SECONDS = 2.0  # for answers that are being written, after END_ANSWERS


class RouterDrainState(StateName):
    """How far the drain of a router is."""

    SERVING = "serving"
    LAG = "lag"
    DRAINING = "draining"
    ENDING = "ending"
    ENDED = "ended"


class RouterDrainEvent(StateName):
    """What the drain of a router meets."""

    DRAIN_REQUESTED = "DrainRequested"
    STOP_REQUESTED = "StopRequested"
    LAG_OVER = "LagOver"
    TIME_OVER = "TimeOver"
    NOTHING_OPEN = "NothingOpen"


class RouterDrainStep(enum.Enum):
    """What the process does, in this order; a step may come twice and then does nothing."""

    BECOME_UNREADY = "become unready"  # /readyz is 503 and answers close their connections
    STOP_LISTENING = "stop listening"  # new connections are refused, idle ones closed
    END_ANSWERS = "end answers"  # streams get an error event, other answers a 503
    EXIT = "exit"  # what is still open is dropped


TRANSITIONS = StateTable[RouterDrainState, RouterDrainEvent](
    "router",
    {
        RouterDrainState.SERVING: {
            RouterDrainEvent.DRAIN_REQUESTED: RouterDrainState.LAG,
            RouterDrainEvent.STOP_REQUESTED: RouterDrainState.ENDING,
        },
        RouterDrainState.LAG: {
            RouterDrainEvent.DRAIN_REQUESTED: RouterDrainState.ENDING,
            RouterDrainEvent.STOP_REQUESTED: RouterDrainState.ENDING,
            RouterDrainEvent.LAG_OVER: RouterDrainState.DRAINING,
        },
        RouterDrainState.DRAINING: {
            RouterDrainEvent.DRAIN_REQUESTED: RouterDrainState.ENDING,
            RouterDrainEvent.STOP_REQUESTED: RouterDrainState.ENDING,
            RouterDrainEvent.TIME_OVER: RouterDrainState.ENDING,
            RouterDrainEvent.NOTHING_OPEN: RouterDrainState.ENDED,
        },
        RouterDrainState.ENDING: {
            RouterDrainEvent.DRAIN_REQUESTED: RouterDrainState.ENDING,
            RouterDrainEvent.STOP_REQUESTED: RouterDrainState.ENDING,
            RouterDrainEvent.TIME_OVER: RouterDrainState.ENDED,
            RouterDrainEvent.NOTHING_OPEN: RouterDrainState.ENDED,
        },
        RouterDrainState.ENDED: {},
    },
)

STEPS: dict[RouterDrainState, tuple[RouterDrainStep, ...]] = {
    RouterDrainState.LAG: (RouterDrainStep.BECOME_UNREADY,),
    RouterDrainState.DRAINING: (RouterDrainStep.STOP_LISTENING,),
    RouterDrainState.ENDING: (
        RouterDrainStep.BECOME_UNREADY,
        RouterDrainStep.STOP_LISTENING,
        RouterDrainStep.END_ANSWERS,
    ),
    RouterDrainState.ENDED: (RouterDrainStep.EXIT,),
}


class RouterDrain:
    """Signals and time in, steps out. `now` in seconds, never decreasing."""

    def __init__(self, lag_seconds: float, drain_seconds: float):
        self.state = TRANSITIONS.start
        self._seconds = {
            RouterDrainState.LAG: lag_seconds,
            RouterDrainState.DRAINING: drain_seconds,
            RouterDrainState.ENDING: ENDING_SECONDS,
        }
        self._deadline = 0.0  # of the state
        self._looked_at = 0.0
        self._effects: list[RouterDrainStep | Note] = []

    def sigterm(self, now: float) -> None:
        """Drain; asked a second time, end."""
        self._meet(RouterDrainEvent.DRAIN_REQUESTED, now)

    def sigint(self, now: float) -> None:
        """End soon."""
        self._meet(RouterDrainEvent.STOP_REQUESTED, now)

    def tick(self, now: float, open_answers: int) -> None:
        """Time has passed, and `open_answers` are not all written yet."""
        self._looked_at = now
        if self.state is RouterDrainState.LAG and now >= self._deadline:
            self._meet(RouterDrainEvent.LAG_OVER, now)
        if self.state in (RouterDrainState.DRAINING, RouterDrainState.ENDING):
            if not open_answers:
                self._meet(RouterDrainEvent.NOTHING_OPEN, now)
            elif now >= self._deadline:
                if self.state is RouterDrainState.DRAINING:
                    self._effects.append(Note("router.ended_with_work", {"answers": open_answers}, "warning"))
                self._meet(RouterDrainEvent.TIME_OVER, now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the latest; None: nothing."""
        if self.state in (RouterDrainState.SERVING, RouterDrainState.ENDED):
            return None
        if self.state is RouterDrainState.LAG:
            return self._deadline
        return min(self._deadline, self._looked_at + LOOK_SECONDS)

    def take_effects(self) -> list[RouterDrainStep | Note]:
        """The steps since the last call, to be carried out in order, and their log lines."""
        effects, self._effects = self._effects, []
        return effects

    def _meet(self, event: RouterDrainEvent, now: float) -> None:
        if self.state in TRANSITIONS.ended:
            return  # a signal that comes too late
        before, self.state = self.state, TRANSITIONS.next(self.state, event)
        if before is self.state:
            return
        self._deadline = now + self._seconds.get(self.state, 0.0)
        self._looked_at = now
        fields = {"from": before.value, "on": event.value, "to": self.state.value}
        self._effects += [Note("router.drain", fields), *STEPS[self.state]]

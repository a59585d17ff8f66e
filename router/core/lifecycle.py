"""The states of a request at the router, as one table.

A request is in one `State`; what happens to it is an `Event`; `TRANSITIONS` says where that leads. A pair that is
not in the table is a bug in this program and raises. Guards are events: whether a loss is one too many, or whether
the output is complete, is decided by who makes the event (`dispatch`), so the table needs no conditions.

`waiting` and `ready` wait for a worker to be chosen, `prefilling` and `decoding` for a worker to answer; a `ready`
request depends on the worker that lends its pages. This file knows nothing of workers, messages or time.
The picture in docs/request-life.md is `diagram()`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import structlog

from shared.errors import InvariantError

log = structlog.get_logger(__name__)


class State(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"  # queued for a prefill worker
    PREFILLING = "prefilling"  # a prefill worker has it
    READY = "ready"  # its pages lie on a worker under a lease; queued for a decode worker
    DECODING = "decoding"  # a decode worker has it
    FINISHED = "finished"  # all output delivered
    CANCELLED = "cancelled"  # the client has gone
    FAILED = "failed"  # ended with an error


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a request; `worker` and `cause` are for the log."""

    worker: str = ""
    cause: str = ""


class Placed(Event):
    """A worker was chosen and told."""


class Prefilled(Event):
    """The first token of this attempt and a baton have come."""


class Joined(Event):
    """The pages have arrived at the decode worker."""


class Generated(Event):
    """Further tokens have come."""


class Moving(Event):
    """The decode worker lends the pages, so that another one goes on."""


class NoRoom(Event):
    """The worker refused for lack of room; what was computed remains valid."""


class Stale(Event):
    """The pages cannot be fetched any more, or not by that worker."""


class Lost(Event):
    """The worker that the state waits on is gone, or what it says cannot be trusted."""


class TakerLost(Event):
    """The worker that a request moved to is gone before it had the pages, and they are still lent."""


class LeaseEnded(Event):
    """Whoever lent the pages has given them up."""


class Finished(Event):
    """The output is complete."""


class Stopped(Event):
    """A stop string was found in the text."""


class Cancelled(Event):
    """The client has gone."""


class Expired(Event):
    """A time limit has passed."""


class Exhausted(Event):
    """One more attempt would be one too many."""


class Rejected(Event):
    """A worker says that this request can never be served."""


_ENDS: dict[type[Event], State] = {
    Stopped: State.FINISHED,
    Cancelled: State.CANCELLED,
    Expired: State.FAILED,
}

TRANSITIONS: dict[State, dict[type[Event], State]] = {
    State.WAITING: {
        Placed: State.PREFILLING,
        **_ENDS,
    },
    State.PREFILLING: {
        Prefilled: State.READY,
        NoRoom: State.WAITING,
        Lost: State.WAITING,
        Finished: State.FINISHED,
        Rejected: State.FAILED,
        Exhausted: State.FAILED,
        **_ENDS,
    },
    State.READY: {
        Placed: State.DECODING,
        LeaseEnded: State.WAITING,
        Lost: State.WAITING,
        Exhausted: State.FAILED,
        **_ENDS,
    },
    State.DECODING: {
        Joined: State.DECODING,
        Generated: State.DECODING,
        Moving: State.READY,
        NoRoom: State.READY,
        TakerLost: State.READY,
        Stale: State.WAITING,
        Lost: State.WAITING,
        Finished: State.FINISHED,
        Rejected: State.FAILED,
        Exhausted: State.FAILED,
        **_ENDS,
    },
    State.FINISHED: {},
    State.CANCELLED: {},
    State.FAILED: {},
}

ENDED = frozenset(state for state, row in TRANSITIONS.items() if not row)


def next_state(state: State, event: type[Event]) -> State:
    """The table's answer; raises `InvariantError` where it has none."""
    row = TRANSITIONS[state]
    if event not in row:
        raise InvariantError(f"a {state.value} request cannot meet {event.__name__}")
    return row[event]


class Lifecycle:
    """The state of one request. `advance` is the only writer, and every change of state is one log line."""

    __slots__ = ("_state", "rid")

    def __init__(self, rid: str):
        self.rid = rid
        self._state = State.WAITING

    @property
    def state(self) -> State:
        return self._state

    def advance(self, event: Event) -> State:
        """Follow the table; returns the new state, raises `InvariantError` for a pair it does not have."""
        before, name = self._state, type(event).__name__
        try:
            self._state = next_state(before, type(event))
        except InvariantError as error:
            raise InvariantError(f"request {self.rid}: {error}") from None
        if before is not self._state:
            fields = {"from": before.value, "on": name, "to": self._state.value}
            log.info("request", rid=self.rid, worker=event.worker, cause=event.cause, **fields)
        return self._state


def diagram() -> str:
    """The table as a mermaid state diagram; events that lead the same way share an arrow."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.WAITING.value}"]
    for state, row in TRANSITIONS.items():
        for target in State:
            events = [event.__name__ for event, to in row.items() if to is target]
            if events:
                lines.append(f"    {state.value} --> {target.value}: {' | '.join(events)}")
    lines += [f"    {state.value} --> [*]" for state in State if state in ENDED]
    return "\n".join(lines) + "\n"

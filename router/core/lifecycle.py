"""The states of a request at the router, as one table.

A request is in one `RequestState`; what happens to it is a `RequestEvent`; `TRANSITIONS` says where that leads. A
pair that is not in the table is a bug in this program and raises. Guards are events: whether a loss is one too many,
or whether the output is complete, is decided by who makes the event (`dispatch`), so the table needs no conditions.

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


class RequestState(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"  # queued for a prefill worker
    PREFILLING = "prefilling"  # a prefill worker has it
    READY = "ready"  # its pages lie on a worker under a lease; queued for a decode worker
    DECODING = "decoding"  # a decode worker has it
    FINISHED = "finished"  # all output delivered
    CANCELLED = "cancelled"  # the client has gone
    FAILED = "failed"  # ended with an error


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """Something that happened to a request; `worker` and `cause` are for the log."""

    worker: str = ""
    cause: str = ""


class Placed(RequestEvent):
    """A worker was chosen and told."""


class Prefilled(RequestEvent):
    """The first token of this attempt and a baton have come."""


class Joined(RequestEvent):
    """The pages have arrived at the decode worker."""


class Generated(RequestEvent):
    """Further tokens have come."""


class Migrating(RequestEvent):
    """The decode worker lends the pages, so that another one goes on."""


class NoRoom(RequestEvent):
    """The worker refused for lack of room; what was computed remains valid."""


class Stale(RequestEvent):
    """The pages cannot be fetched any more, or not by that worker."""


class Lost(RequestEvent):
    """The worker that the state waits on is gone, or what it says cannot be trusted."""


class MigrationTargetLost(RequestEvent):
    """The worker that a request moved to is gone before it had the pages, and they are still lent."""


class LeaseEnded(RequestEvent):
    """Whoever lent the pages has given them up."""


class Finished(RequestEvent):
    """The output is complete."""


class Stopped(RequestEvent):
    """A stop string was found in the text."""


class Cancelled(RequestEvent):
    """The client has gone."""


class Expired(RequestEvent):
    """A time limit has passed."""


class Exhausted(RequestEvent):
    """One more attempt would be one too many."""


class Rejected(RequestEvent):
    """A worker says that this request can never be served."""


_ENDS: dict[type[RequestEvent], RequestState] = {
    Stopped: RequestState.FINISHED,
    Cancelled: RequestState.CANCELLED,
    Expired: RequestState.FAILED,
}

TRANSITIONS: dict[RequestState, dict[type[RequestEvent], RequestState]] = {
    RequestState.WAITING: {
        Placed: RequestState.PREFILLING,
        **_ENDS,
    },
    RequestState.PREFILLING: {
        Prefilled: RequestState.READY,
        NoRoom: RequestState.WAITING,
        Lost: RequestState.WAITING,
        Finished: RequestState.FINISHED,
        Rejected: RequestState.FAILED,
        Exhausted: RequestState.FAILED,
        **_ENDS,
    },
    RequestState.READY: {
        Placed: RequestState.DECODING,
        LeaseEnded: RequestState.WAITING,
        Lost: RequestState.WAITING,
        Exhausted: RequestState.FAILED,
        **_ENDS,
    },
    RequestState.DECODING: {
        Joined: RequestState.DECODING,
        Generated: RequestState.DECODING,
        Migrating: RequestState.READY,
        NoRoom: RequestState.READY,
        MigrationTargetLost: RequestState.READY,
        Stale: RequestState.WAITING,
        Lost: RequestState.WAITING,
        Finished: RequestState.FINISHED,
        Rejected: RequestState.FAILED,
        Exhausted: RequestState.FAILED,
        **_ENDS,
    },
    RequestState.FINISHED: {},
    RequestState.CANCELLED: {},
    RequestState.FAILED: {},
}

ENDED = frozenset(state for state, row in TRANSITIONS.items() if not row)


def next_state(state: RequestState, event: type[RequestEvent]) -> RequestState:
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
        self._state = RequestState.WAITING

    @property
    def state(self) -> RequestState:
        return self._state

    def advance(self, event: RequestEvent) -> RequestState:
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
    lines = ["stateDiagram-v2", f"    [*] --> {RequestState.WAITING.value}"]
    for state, row in TRANSITIONS.items():
        for target in RequestState:
            events = [event.__name__ for event, to in row.items() if to is target]
            if events:
                lines.append(f"    {state.value} --> {target.value}: {' | '.join(events)}")
    lines += [f"    {state.value} --> [*]" for state in RequestState if state in ENDED]
    return "\n".join(lines) + "\n"

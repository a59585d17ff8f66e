"""The states of a request at the router, as one table.

A request is in one `RequestState`; what happens to it is a `RequestEvent`; `TRANSITIONS` says where that leads. A
pair that is not in the table is a bug in this program and raises. Guards are events: `dispatch` decides whether a
loss is one too many and whether the output is complete, so the table needs no conditions.

`waiting` and `ready` wait for a worker to be chosen, `prefilling`, `extending` and `decoding` for a worker to answer; a
`ready` request depends on the worker that leases its pages. This file knows nothing of workers, messages or time.
"""

from __future__ import annotations

from shared.primitives.errors import InvariantError
from shared.primitives.state_table import StateName, StateTable


class RequestState(StateName):
    """Where a request is."""

    WAITING = "waiting"  # queued for a worker that computes its prompt
    PREFILLING = "prefilling"  # a prefill worker has it
    EXTENDING = "extending"  # a decode worker has it and computes its prompt
    READY = "ready"  # its pages lie on a worker under a lease; queued for a decode worker
    DECODING = "decoding"  # a decode worker has it
    FINISHED = "finished"  # all output delivered
    CANCELLED = "cancelled"  # the client has gone
    FAILED = "failed"  # ended with an error


class RequestEvent(StateName):
    """What happened to a request."""

    PLACED = "Placed"  # a worker was chosen and has been sent the request
    PLACED_WHOLE = "PlacedWhole"  # a decode worker was chosen and has been sent the request, prompt and all
    PREFILLED = "Prefilled"  # the first token of this attempt has come, and from a prefill worker a baton
    JOINED = "Joined"  # the pages have arrived at the decode worker
    GENERATED = "Generated"  # further tokens have come
    MIGRATING = "Migrating"  # the decode worker leases the pages to another one, which goes on
    NO_ROOM = "NoRoom"  # the worker refused for lack of room; what was computed remains valid
    UNREACHABLE = "Unreachable"  # that worker cannot fetch the pages; another one may
    STALE = "Stale"  # the pages cannot be fetched any more, or by nobody
    LOST = "Lost"  # the worker that the state waits on is gone, or its messages cannot be trusted
    MIGRATION_TARGET_LOST = "MigrationTargetLost"  # the new worker is lost before it had the pages
    LEASE_ENDED = "LeaseEnded"  # the holder of the pages has given them up
    FINISHED = "Finished"  # the output is complete
    STOPPED = "Stopped"  # a stop string was found in the text
    CANCELLED = "Cancelled"  # the client has gone
    EXPIRED = "Expired"  # a time limit has passed
    EXHAUSTED = "Exhausted"  # one more attempt would be one too many
    REJECTED = "Rejected"  # a worker found that this request can never be served

    __hash__ = object.__hash__  # as above


_ENDS: dict[RequestEvent, RequestState] = {
    RequestEvent.STOPPED: RequestState.FINISHED,
    RequestEvent.CANCELLED: RequestState.CANCELLED,
    RequestEvent.EXPIRED: RequestState.FAILED,
}

TRANSITIONS = StateTable[RequestState, RequestEvent](
    "request",
    {
        RequestState.WAITING: {
            RequestEvent.PLACED: RequestState.PREFILLING,
            RequestEvent.PLACED_WHOLE: RequestState.EXTENDING,
            **_ENDS,
        },
        RequestState.EXTENDING: {
            RequestEvent.PREFILLED: RequestState.DECODING,
            RequestEvent.MIGRATING: RequestState.READY,
            RequestEvent.NO_ROOM: RequestState.WAITING,
            RequestEvent.LOST: RequestState.WAITING,
            RequestEvent.FINISHED: RequestState.FINISHED,
            RequestEvent.REJECTED: RequestState.FAILED,
            RequestEvent.EXHAUSTED: RequestState.FAILED,
            **_ENDS,
        },
        RequestState.PREFILLING: {
            RequestEvent.PREFILLED: RequestState.READY,
            RequestEvent.NO_ROOM: RequestState.WAITING,
            RequestEvent.LOST: RequestState.WAITING,
            RequestEvent.FINISHED: RequestState.FINISHED,
            RequestEvent.REJECTED: RequestState.FAILED,
            RequestEvent.EXHAUSTED: RequestState.FAILED,
            **_ENDS,
        },
        RequestState.READY: {
            RequestEvent.PLACED: RequestState.DECODING,
            RequestEvent.LEASE_ENDED: RequestState.WAITING,
            RequestEvent.LOST: RequestState.WAITING,
            RequestEvent.FINISHED: RequestState.FINISHED,  # router and worker disagree on the end tokens
            RequestEvent.EXHAUSTED: RequestState.FAILED,
            **_ENDS,
        },
        RequestState.DECODING: {
            RequestEvent.JOINED: RequestState.DECODING,
            RequestEvent.GENERATED: RequestState.DECODING,
            RequestEvent.MIGRATING: RequestState.READY,
            RequestEvent.NO_ROOM: RequestState.READY,
            RequestEvent.UNREACHABLE: RequestState.READY,
            RequestEvent.MIGRATION_TARGET_LOST: RequestState.READY,
            RequestEvent.STALE: RequestState.WAITING,
            RequestEvent.LOST: RequestState.WAITING,
            RequestEvent.FINISHED: RequestState.FINISHED,
            RequestEvent.REJECTED: RequestState.FAILED,
            RequestEvent.EXHAUSTED: RequestState.FAILED,
            **_ENDS,
        },
        RequestState.FINISHED: {},
        RequestState.CANCELLED: {},
        RequestState.FAILED: {},
    },
)


def next_state(state: RequestState, event: RequestEvent, rid: str) -> RequestState:
    """Follow the table. Raises `InvariantError`, which names the request, for a pair that the table does not have."""
    try:
        return TRANSITIONS.next(state, event)
    except InvariantError as error:
        raise InvariantError(f"request {rid}: {error}") from None

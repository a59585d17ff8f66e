"""The states of a request on a decode worker, as one table.

`Req.state` is the truth about where a request is. `RequestStates.advance` is its only writer, and a pair that is not in
the table raises. The lists of the scheduler's parts hold requests in the order that matters to each (who came first,
who was retracted first); `DecodeScheduler.check` proves that lists and states agree.

A request that is taken out of the batch still has a row in the step in flight: it is `migrating` or `retracting` until
that step has settled, which is within the same turn of the loop. So no command ever meets these two states. While its
pages are copied nothing else may touch them: a request that is cancelled then is `aborting` until the copy has ended.
"""

from __future__ import annotations

from shared.kv.leases import LeaseEnd
from shared.primitives.state_table import StateName, StateTable


class DecodeState(StateName):
    """Where a request is."""

    WAITING = "waiting"  # it holds nothing; another request is fetching the prefix that it needs, too
    TRANSFERRING = "transferring"  # in a slot, its pages are being fetched
    JOINING = "joining"  # its pages are here; it is part of the next step
    RUNNING = "running"  # it decodes one token a step
    MIGRATING = "migrating"  # out of the batch, to continue elsewhere; its last step has not settled
    LEASED = "leased"  # its pages are leased to the worker that continues it
    RETRACTING = "retracting"  # out of the batch, for lack of pages; its last step has not settled
    BACKING_UP = "backing_up"  # its pages are being copied to host memory
    RETRACTED = "retracted"  # its pages lie in host memory
    QUEUED = "queued"  # host memory had no room for its pages: it holds nothing, and is to be computed again
    EXTENDING = "extending"  # in a slot with pages for all its tokens, which are being computed
    RESTORING = "restoring"  # in a slot, its pages are being copied back
    ABORTING = "aborting"  # cancelled while its pages are being copied
    FINISHED = "finished"  # all its tokens are sampled
    FAILED = "failed"  # by its own fault: what it asks for cannot be sampled
    REFUSED = "refused"  # given back to the router
    CANCELLED = "cancelled"  # the router or its session is gone, or a newer attempt came
    RELEASED = "released"  # its lease has ended


class DecodeEvent(StateName):
    """What happens to a request."""

    REFUSED = "Refused"
    FETCH_STARTED = "FetchStarted"
    ALL_CACHED = "AllCached"
    LANDED = "Landed"
    STALE = "Stale"
    FETCH_FAILED = "FetchFailed"
    JOINED = "Joined"
    FINISHED = "Finished"
    FAILED = "Failed"
    CANCELLED = "Cancelled"
    MIGRATION_STARTED = "MigrationStarted"
    LEASED = "Leased"
    RELEASED = "Released"
    EXPIRED = "Expired"
    RETRACTED = "Retracted"
    BACKUP_STARTED = "BackupStarted"
    HOST_FULL = "HostFull"
    QUEUED = "Queued"
    RECOMPUTE_STARTED = "RecomputeStarted"
    RECOMPUTED = "Recomputed"
    EXTEND_STARTED = "ExtendStarted"
    COMPUTED = "Computed"
    PUT_BACK = "PutBack"
    BACKED_UP = "BackedUp"
    RESTORE_STARTED = "RestoreStarted"
    RESTORED = "Restored"
    DEADLOCKED = "Deadlocked"


_S, _E = DecodeState, DecodeEvent
TRANSITIONS: StateTable[DecodeState, DecodeEvent] = StateTable(
    "request",
    {
        _S.WAITING: {
            _E.FETCH_STARTED: _S.TRANSFERRING,
            _E.ALL_CACHED: _S.JOINING,
            _E.EXTEND_STARTED: _S.EXTENDING,
            _E.REFUSED: _S.REFUSED,
            _E.CANCELLED: _S.CANCELLED,
        },
        _S.TRANSFERRING: {
            _E.LANDED: _S.JOINING,
            _E.STALE: _S.REFUSED,
            _E.FETCH_FAILED: _S.REFUSED,
            _E.CANCELLED: _S.CANCELLED,
        },
        _S.JOINING: {
            _E.JOINED: _S.RUNNING,
            _E.CANCELLED: _S.CANCELLED,
        },
        _S.RUNNING: {
            _E.FINISHED: _S.FINISHED,
            _E.FAILED: _S.FAILED,
            _E.MIGRATION_STARTED: _S.MIGRATING,
            _E.RETRACTED: _S.RETRACTING,
            _E.DEADLOCKED: _S.REFUSED,
            _E.CANCELLED: _S.CANCELLED,
        },
        _S.MIGRATING: {
            _E.LEASED: _S.LEASED,
            _E.FINISHED: _S.FINISHED,
            _E.FAILED: _S.FAILED,
        },
        _S.LEASED: {
            _E.RELEASED: _S.RELEASED,
            _E.EXPIRED: _S.RELEASED,
            _E.CANCELLED: _S.CANCELLED,
        },
        _S.RETRACTING: {
            _E.BACKUP_STARTED: _S.BACKING_UP,
            _E.HOST_FULL: _S.REFUSED,
            _E.QUEUED: _S.QUEUED,
            _E.FINISHED: _S.FINISHED,
            _E.FAILED: _S.FAILED,
        },
        _S.BACKING_UP: {
            _E.BACKED_UP: _S.RETRACTED,
            _E.CANCELLED: _S.ABORTING,
        },
        _S.RETRACTED: {
            _E.RESTORE_STARTED: _S.RESTORING,
            _E.DEADLOCKED: _S.REFUSED,
            _E.CANCELLED: _S.CANCELLED,
        },
        _S.QUEUED: {
            _E.RECOMPUTE_STARTED: _S.EXTENDING,
            _E.HOST_FULL: _S.REFUSED,
            _E.ALL_CACHED: _S.JOINING,
            _E.DEADLOCKED: _S.REFUSED,
            _E.CANCELLED: _S.CANCELLED,
        },
        _S.EXTENDING: {
            _E.RECOMPUTED: _S.JOINING,
            _E.COMPUTED: _S.JOINING,
            _E.LEASED: _S.LEASED,
            _E.PUT_BACK: _S.REFUSED,
            _E.FINISHED: _S.FINISHED,
            _E.FAILED: _S.FAILED,
            _E.HOST_FULL: _S.REFUSED,
            _E.CANCELLED: _S.CANCELLED,
        },
        _S.RESTORING: {
            _E.RESTORED: _S.JOINING,
            _E.CANCELLED: _S.ABORTING,
        },
        _S.ABORTING: {
            _E.BACKED_UP: _S.CANCELLED,
            _E.RESTORED: _S.CANCELLED,
        },
        _S.FINISHED: {},
        _S.FAILED: {},
        _S.REFUSED: {},
        _S.CANCELLED: {},
        _S.RELEASED: {},
    },
)

ENDED = tuple(TRANSITIONS.ended)  # a tuple finds a state by identity, which is cheap enough for every token

LEASE_ENDS = {
    LeaseEnd.RELEASED: DecodeEvent.RELEASED,
    LeaseEnd.EXPIRED: DecodeEvent.EXPIRED,
    LeaseEnd.CANCELLED: DecodeEvent.CANCELLED,
}

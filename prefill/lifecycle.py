"""The states of a request on a prefill worker, as one table.

`Req.state` is the truth about where a request is. `RequestStates.advance` is its only writer, and a pair that is not in
the table raises. A request that is refused when it comes is never in the table. The queue, the slots and the leases
hold requests in their own order; `PrefillScheduler.check` proves that they and the states agree.
"""

from __future__ import annotations

from shared.kv.leases import LeaseEnd
from shared.primitives.state_table import StateName, StateTable


class PrefillState(StateName):
    """Where a request is."""

    WAITING = "waiting"  # queued; it holds nothing
    CHUNKED = "chunked"  # in a slot; the rest of its prompt is not planned yet
    RUNNING = "running"  # in a slot; its last row is in the step in flight
    LEASED = "leased"  # its prompt is computed, its pages are leased
    FINISHED = "finished"  # it ended with its first token
    FAILED = "failed"  # by its own fault: what it asks for cannot be sampled
    CANCELLED = "cancelled"  # the router or its session is gone, or a newer attempt came
    RELEASED = "released"  # its lease has ended


class PrefillEvent(StateName):
    """What happens to a request."""

    CHUNK_PLANNED = "ChunkPlanned"
    LAST_PLANNED = "LastPlanned"
    LEASED = "Leased"
    FINISHED = "Finished"
    FAILED = "Failed"
    RELEASED = "Released"
    EXPIRED = "Expired"
    CANCELLED = "Cancelled"


_S, _E = PrefillState, PrefillEvent
TRANSITIONS: StateTable[PrefillState, PrefillEvent] = StateTable(
    "request",
    {
        _S.WAITING: {
            _E.CHUNK_PLANNED: _S.CHUNKED,
            _E.LAST_PLANNED: _S.RUNNING,
            _E.CANCELLED: _S.CANCELLED,
        },
        _S.CHUNKED: {
            _E.CHUNK_PLANNED: _S.CHUNKED,
            _E.LAST_PLANNED: _S.RUNNING,
            _E.CANCELLED: _S.CANCELLED,
        },
        _S.RUNNING: {
            _E.LEASED: _S.LEASED,
            _E.FINISHED: _S.FINISHED,
            _E.FAILED: _S.FAILED,
            _E.CANCELLED: _S.CANCELLED,
        },
        _S.LEASED: {
            _E.RELEASED: _S.RELEASED,
            _E.EXPIRED: _S.RELEASED,
            _E.CANCELLED: _S.CANCELLED,
        },
        _S.FINISHED: {},
        _S.FAILED: {},
        _S.CANCELLED: {},
        _S.RELEASED: {},
    },
)

LEASE_ENDS = {
    LeaseEnd.RELEASED: PrefillEvent.RELEASED,
    LeaseEnd.EXPIRED: PrefillEvent.EXPIRED,
    LeaseEnd.CANCELLED: PrefillEvent.CANCELLED,
}

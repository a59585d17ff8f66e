"""A worker is not trusted: an error on the way of one worker's message costs that worker its session, and nothing more.

What a worker may say is bounded where its bytes are decoded, and judged where it is taken (`worker_replies`). This is
what is left: the core raises although both have passed. Whoever fails the process here lets one worker end all
streams of all routers, again after each restart. So the worker is dropped as one that is lost, its session ends, and
the requests that it had go on elsewhere.

The message may be half applied. The request that it was about is struck from all books and ends with 500; then the
books are checked, and if they still disagree the error is raised after all: a core that cannot be trusted ends.
"""

from __future__ import annotations

from router.core.counters import RouterCounters
from router.core.effects import EndSession, RequestEnded, RequestFailed, RouterEffect
from router.core.fleet.workers import Fleet
from router.core.requests.live_request import LiveRequest
from router.core.requests.request_table import RequestTable
from router.core.worker_events import books
from router.core.worker_events.membership import Membership
from shared.batch.effects import Note
from shared.links.session import reason_of

FAILED = RequestFailed(500, "The answer of a worker could not be used.", code="worker_failed")


class WorkerFaults:
    """Drops workers. `now` in seconds."""

    def __init__(
        self,
        fleet: Fleet,
        requests: RequestTable,
        membership: Membership,
        counters: RouterCounters,
        effects: list[RouterEffect],
    ):
        self._fleet = fleet
        self._requests = requests
        self._membership = membership
        self._counters = counters
        self._effects = effects

    def drop(self, peer: str, said: str, about: LiveRequest | None, error: Exception, now: float) -> None:
        """`error` came up while `said`, a message of this worker, was taken, maybe `about` a request.

        Raises what comes up here, also `InvariantError` if the books do not agree: then the state cannot be trusted.
        """
        if about is not None:
            self._strike(about, now)
        self._membership.down(peer, now)
        books.check(self._requests, self._fleet)
        reason = reason_of(error)
        self._counters.worker_faults[said] += 1
        fields = {"worker": peer, "message": said, "rid": about.rid if about else "", "reason": reason}
        self._effects.append(Note("fleet.worker_failed", fields, "error"))
        self._effects.append(EndSession(peer, f"its {said} could not be taken: {reason}"))

    def _strike(self, live: LiveRequest, now: float) -> None:
        books.strike(live, self._requests, self._fleet, now)
        if not any(isinstance(each, RequestEnded) and each.rid == live.rid for each in self._effects):
            self._counters.requests[str(FAILED.status)] += 1
            self._effects.append(RequestEnded(live.rid, FAILED))

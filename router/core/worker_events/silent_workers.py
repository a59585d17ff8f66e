"""Requests that their worker is silent about for `stall_seconds`, and workers that are silent about all they have.

The latter take requests and answer none. They are found by comparison with others, long before `stall_seconds`.

A worker that swallows requests looks empty, so it is given the most of them. Its own `Load` convicts it: a worker that
has a request says so, and pushes that at once when it had none before. So the verdict falls on a worker that for
`silent_seconds`

- has said nothing of any request that it has, and
- reports none, neither queued nor running,

while others have answered at least `COMPARED_MIN` requests that were sent later than one that it has had for so long,
and were as much work. A worker alone gets no verdict: it may be the router or the network that is slow. A worker that
reports requests gets none either: steps may be long, and queues. What it reports, it is not given in addition.

What follows is a stall of all that it has (`request_table.try_again`). The worker rests for `silent_seconds`; then
it is given one request at a time, until it says something of one.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from router.config import RouterConfig
from router.core.counters import RouterCounters
from router.core.effects import RouterEffect
from router.core.fleet.assignments import Assignment
from router.core.fleet.worker import Worker
from router.core.fleet.workers import Fleet
from router.core.requests.lifecycle import RequestEvent
from router.core.requests.live_request import LiveRequest
from router.core.requests.request_table import RequestTable
from router.core.requests.reservations import Deadline, Reservations
from shared.batch.effects import Note
from shared.wire.messages import WORKER_ROLES, Role

COMPARED_MIN = 3  # answers of others
ANSWERS_MAX = 256  # of a role, the last ones; what is older is of no use to a worker that is silent now
REQUESTS_MAX = 16  # that a worker is compared by, the first ones
LOOKS = 4  # in each `silent_seconds`, at a worker that is silent and was not judged


# Who answered, when that request was sent (seconds), and the tokens to compute for it (prefill) or to hold (decode).
Answer = tuple[Worker, float, int]


class SilentWorkers:
    """Judges the silence of workers. A look costs what is remembered of answers, a message O(1). `now` in seconds."""

    def __init__(
        self,
        settings: RouterConfig,
        fleet: Fleet,
        requests: RequestTable,
        reservations: Reservations,
        counters: RouterCounters,
        effects: list[RouterEffect],
    ):
        self._settings = settings
        self._fleet = fleet
        self._requests = requests
        self._reservations = reservations
        self._counters = counters
        self._effects = effects
        self._answers: dict[Role, deque[Answer]] = {role: deque(maxlen=ANSWERS_MAX) for role in WORKER_ROLES}

    def answered(self, live: LiveRequest, worker: Worker, cached_tokens: int | None = None) -> None:
        """The worker has said the first token (prefill) or row (decode) of this attempt.

        What it found in its cache says how much work that was, whatever was expected of the cache.
        """
        live.answered = True
        assignment = worker.assigned[live.rid]
        tokens = assignment.tokens if cached_tokens is None else max(0, live.need.tokens - cached_tokens)
        self._answers[worker.hello.role].append((worker, assignment.sent_at, tokens))
        if worker.doubted is not None:
            worker.doubted = None
            worker.changed(worker)

    def due(self, kind: Deadline, name: str, now: float) -> bool:
        """A deadline of a silence is due; returns whether something may be placed now that could not be before."""
        if kind == "stall":
            return self._look_at_request(self._requests.live[name], now)
        return self._look(name, now) if kind == "silent" else self._try_again(name)

    def _look_at_request(self, live: LiveRequest, now: float) -> bool:
        """Cancel a request, and try it again, if its worker is up and may have forgotten it; returns whether it did."""
        worker = live.worker
        assert worker is not None, live.rid
        if not self._reservations.has_stalled(live, now):
            return False
        fields = {
            "rid": live.rid,
            "worker": worker.peer,
            "attempt": live.attempt,
            "state": live.state.value,
        }
        self._effects.append(Note("request.stalled", fields, "warning"))
        self._requests.try_again(live, RequestEvent.LOST, now, peer=worker.peer, cause="stalled")
        return True

    def _look(self, peer: str, now: float) -> bool:
        """Judge a worker that may have been silent for too long, or look again when it may have been.

        Returns whether it was found silent: then what it had may be placed elsewhere.
        """
        worker, seconds = self._fleet.workers.get(peer), self._settings.silent_seconds
        if worker is None or not worker.assigned:
            return False  # the next assignment sets the next look
        due = max(self._heard_at(worker), next(iter(worker.assigned.values())).sent_at) + seconds
        if now < due or not self._is_silent(worker, now - seconds):
            again = due if now < due else now + seconds / LOOKS
            self._reservations.deadlines.set(("silent", peer), again)
            return False
        self._convict(worker, now)
        return True

    def _try_again(self, peer: str) -> bool:
        """A worker that was found silent has rested: it may have one request."""
        worker = self._fleet.workers.get(peer)
        if worker is None or worker.doubted != "rests":
            return False
        worker.doubted = "tried"
        worker.changed(worker)
        return True

    def _heard_at(self, worker: Worker) -> float:
        """When it last said something of a request that it has or had. Kept by request: a row costs nothing more."""
        heard = (
            (self._requests.live[rid].heard_at, assignment.sent_at)
            for rid, assignment in worker.assigned.items()
        )
        return max(worker.heard_at, max((at for at, sent_at in heard if at > sent_at), default=0.0))

    def _is_silent(self, worker: Worker, since: float) -> bool:
        """Whether it reports nothing, and others have answered what was sent later than what it has `since` then."""
        if worker.load.queued or worker.load.running:
            return False
        live = self._requests.live
        reported = (
            assignment
            for rid, assignment in worker.assigned.items()
            if live[rid].request.params.grammar is None  # while one is compiled, its request is not reported
            and assignment.sent_at <= since
        )
        return any(self._others_answered(worker, each) for each in islice(reported, REQUESTS_MAX))

    def _others_answered(self, worker: Worker, unanswered: Assignment) -> bool:
        role = worker.hello.role
        compared = sum(
            other is not worker
            and sent_at > unanswered.sent_at
            and (role == "decode" or tokens >= unanswered.tokens)
            and other.kv_group == worker.kv_group
            for other, sent_at, tokens in self._answers[role]
        )
        return compared >= COMPARED_MIN

    def _convict(self, worker: Worker, now: float) -> None:
        role, reservations = worker.hello.role, self._requests.reservations
        self._counters.silent_workers[role] += 1
        fields = {"worker": worker.peer, "requests": len(worker.assigned)}
        self._effects.append(Note("fleet.worker_silent", fields, "error"))
        worker.doubted = "rests"
        worker.changed(worker)
        reservations.deadlines.set(("trial", worker.peer), now + self._settings.silent_seconds)
        for rid in list(worker.assigned):
            live = self._requests.live[rid]
            self._requests.try_again(live, RequestEvent.LOST, now, peer=worker.peer, cause="silent")

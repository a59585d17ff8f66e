"""Streams that have begun and that no worker could continue: the one lack for which a begun stream is ended.

A stream that has output waits for room as long as it takes. Only if no worker is there that could ever continue it,
full or not, and none comes within `worker_return_seconds`, does it end. The answer is looked up anew only when workers
have come, gone or begun to drain, or when the stream has entered a queue.
"""

from __future__ import annotations

from itertools import takewhile

from router.config import RouterConfig
from router.core.fleet import placement
from router.core.fleet.workers import Fleet
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest
from router.core.requests.reservations import Deadline, Reservations


class StrandedStreams:
    """Sets and clears the deadline `gone` of begun streams. `now` in seconds."""

    def __init__(self, settings: RouterConfig, fleet: Fleet, reservations: Reservations):
        self._settings = settings
        self._fleet = fleet
        self._reservations = reservations

    def look(self, now: float) -> None:
        """Workers or streams may have come or gone."""
        for queue in (self._reservations.waiting, self._reservations.ready):
            for live in takewhile(
                lambda each: each.output, queue.in_order()
            ):  # they stand before those not begun
                if live.fleet_looked_at != self._fleet.changes:
                    live.fleet_looked_at = self._fleet.changes
                    self._note(live, now)

    def _note(self, live: LiveRequest, now: float) -> None:
        name: tuple[Deadline, str] = ("gone", live.rid)
        deadlines = self._reservations.deadlines
        if self._is_served(live):
            deadlines.clear(name)
        elif name not in deadlines:
            deadlines.set(name, now + self._settings.worker_return_seconds)

    def _is_served(self, live: LiveRequest) -> bool:
        """Whether a worker is there that could continue it, and does not drain."""
        if live.state is RequestState.WAITING:
            able = [
                *placement.prefill_workers(live.need, self._fleet),
                *(
                    worker
                    for worker in self._fleet.of_role("decode")
                    if placement.could_serve(live.need, worker, self._fleet)
                ),
            ]
        else:
            able = placement.decode_workers(live.need, self._fleet)
        return any(not worker.draining for worker in able)

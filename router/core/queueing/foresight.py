"""Whether a decode worker will have the pages for a prompt that is not begun yet, soon after it is computed.

What is begun and finds no room is a stream that stands still after its first token. So a prompt is begun only where
some decode worker has pages for it, by what the worker tells: pages that it could give to a new request now, and those
that come back soon. What was begun before and is on its way there is taken off, each request at the worker that was
foreseen for it. Decode workers are told of it, and their loads tell each router what the others have begun. Nor is a
prompt begun where the links are busy for longer with what was begun before.

    pages_for_new + pages_a_second * FORESEEN * ready_seconds * own share - those in front >= pages of the prompt
    (pages_arriving + those in front) / pages_arriving_a_second <= FETCHED_AHEAD * ready_seconds + seconds of prefill

The *own share* is that of this router: other routers count on the same pages. Large requests wait for several ends, so
of `ready_seconds` only a part is foreseen: else half of them would wait longer.

A tenant that has nothing at a worker needs only free pages there, as at the worker itself: for a stream where this
router has others there; where others have them from other routers for the one stream of a tenant that has no other, and
for a prompt that is computed there. Only the worker knows what a tenant has there from other routers: one that has
refused it is believed for a while. A worker that has nothing takes anything that fits it. Older workers tell nothing:
then the prompt is begun. Foresight may be wrong; then a stream pauses.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from router.config import RouterConfig
from router.core.fleet.worker import KvGroup, Worker
from router.core.fleet.workers import Fleet
from router.core.queueing.backpressure import Backpressure
from router.core.requests.live_request import LiveRequest

FORESEEN = 0.5  # of `ready_seconds`: what comes back until then counts
# of `ready_seconds`: so long the links of a decode worker may be busy with what was begun before
FETCHED_AHEAD = 0.3


class Foresight:
    """Looks for the decode worker of a prompt."""

    def __init__(self, settings: RouterConfig, fleet: Fleet, backpressure: Backpressure):
        self._settings = settings
        self._fleet = fleet
        self._backpressure = backpressure
        self._own_share: float | None = None  # of all decode workers, once it was asked for in this pass

    def begin_pass(self) -> None:
        """Look anew how much of what runs is of this router.

        What is placed in a pass does not change that: else one that was told to wait would be passed over.
        """
        self._own_share = None

    def readers(self, live: LiveRequest, kv_groups: Iterable[KvGroup]) -> dict[KvGroup, Worker | None]:
        """The KV groups in which the request may be computed, each with the decode worker that will have room for it.

        None for the worker: nobody tells of room, or the request does not need any.
        """
        found = {}
        for kv_group in kv_groups:
            may_begin, reader = self._look(live, kv_group)
            if may_begin or live.output or live.need.tokens_max - live.need.tokens <= 1:
                found[kv_group] = reader
        return found

    def has_pages(self, live: LiveRequest, worker: Worker) -> bool:
        """Whether the decode worker has pages for a prompt to be computed there; yes if it does not tell.

        They are those that are left beside what is there as it grows; all that are free for one that may be below its
        tenant's share there: the worker knows, and refuses at once.
        """
        if worker.load.pages_for_new < 0 or worker.is_unclaimed:
            return True
        is_light = worker.may_be_below_share(live.tenant.name, live.need.tokens_max)
        told = worker.load.free_pages if is_light else worker.load.pages_for_new
        return told - worker.pages_in_front >= worker.pages_for(live.need.tokens)

    def _look(self, live: LiveRequest, kv_group: KvGroup) -> tuple[bool, Worker | None]:
        """Whether a prompt may be begun, and the decode worker with the most room for it; of a handful, or else of all.

        Nobody tells: it may be begun.
        """
        need, told = live.need, False
        only_max = 0 if live.tenant.running else need.tokens_max
        fetched_ahead = FETCHED_AHEAD * self._settings.ready_seconds + self._backpressure.prefill_seconds
        everyone = self._fleet.of_role("decode")
        handful = self._fleet.open_to("decode").draw(
            self._settings.candidates_max, zlib.crc32(live.rid.encode()) ^ self._fleet.choices
        )
        if self._own_share is None:
            self._own_share = own_share(everyone)
        seconds = FORESEEN * self._settings.ready_seconds * self._own_share
        for workers in (handful, everyone):
            best, spare_max = None, -1.0
            for worker in workers:
                if (
                    worker.load.pages_for_new < 0
                    or worker.draining
                    or worker.kv_group != kv_group
                    or not worker.fits(need.tokens_max)
                    or not need.features <= worker.features
                ):
                    continue
                told = True
                if worker.seconds_to_fetch() > fetched_ahead:
                    continue
                spare = worker.pages_found(live.tenant.name, seconds, only_max)
                spare -= worker.pages_for(need.tokens)
                if spare >= 0 and spare > spare_max:
                    best, spare_max = worker, spare
            if best is not None:
                return True, best
        return not told, None


def own_share(workers: Sequence[Worker]) -> float:
    """The share of what runs at these workers that came from this router: as much of what comes back is for it."""
    own = sum(len(worker.assigned) for worker in workers)
    return own / max(own, 1, sum(worker.load.running + worker.load.queued for worker in workers))

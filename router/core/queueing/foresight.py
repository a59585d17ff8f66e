"""Whether a decode worker will have the pages for a prompt that is not begun yet, soon after it is computed.

What is begun and finds no room is a stream that stands still after its first token. So a prompt is begun only where
some decode worker has pages for it, by what the worker tells: pages that it could give to a new request now, and those
that come back within `ready_seconds`. What was begun before and is on its way there is taken off, each request at the
worker that was foreseen for it.

    pages_for_new + pages_a_second * ready_seconds - those in front >= pages of the prompt

A tenant that has nothing at a worker needs only free pages there, as at the worker itself. A worker that has nothing
takes anything that fits it. Older workers tell nothing: then the prompt is begun. Foresight may be wrong; then a stream
pauses.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from router.config import RouterConfig
from router.core.fleet.workers import Fleet, KvGroup, Worker
from router.core.requests.live_request import LiveRequest


class Foresight:
    """Looks for the decode worker of a prompt."""

    def __init__(self, settings: RouterConfig, fleet: Fleet):
        self._settings = settings
        self._fleet = fleet

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
        """Whether the decode worker has pages for it now, beside what is there as it grows; yes if it does not tell."""
        if worker.load.pages_for_new < 0:
            return True
        load, pages = worker.load, worker.pages_for(live.need.tokens)
        if not (load.queued or load.running or worker.assigned or worker.foreseen):
            return True
        in_front = worker.unreported.pages + sum(worker.reserved.values()) + sum(worker.foreseen.values())
        return load.pages_for_new - in_front >= pages

    def _look(self, live: LiveRequest, kv_group: KvGroup) -> tuple[bool, Worker | None]:
        """Whether a prompt may be begun, and the decode worker with the most room for it; of a handful, or else of all.

        Nobody tells: it may be begun.
        """
        need, told = live.need, False
        everyone = self._fleet.of_role("decode")
        handful = self._fleet.open_to("decode").draw(
            self._settings.candidates_max, zlib.crc32(live.rid.encode()) ^ self._fleet.choices
        )
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
                spare = worker.pages_foreseen(live.tenant.name, self._settings.ready_seconds)
                spare -= worker.pages_for(need.tokens)
                if spare >= 0 and spare > spare_max:
                    best, spare_max = worker, spare
            if best is not None:
                return True, best
        return not told, None

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

    def allows(self, live: LiveRequest, kv_group: KvGroup) -> bool:
        """Whether a prompt may be begun on the prefill workers of this kv_group."""
        if live.output or live.need.tokens_max - live.need.tokens <= 1:
            return True
        return self.reader(live, kv_group) is not None or not any(
            worker.load.pages_for_new >= 0 for worker in self._able(live, kv_group, self._everyone)
        )

    def reader(self, live: LiveRequest, kv_group: KvGroup) -> Worker | None:
        """A decode worker that will have room, the roomiest of a handful; None: nobody will, or nobody tells."""
        takers = self._fleet.open_to("decode").draw(
            self._settings.candidates_max, zlib.crc32(live.rid.encode()) ^ self._fleet.choices
        )
        for workers in (takers, self._everyone):
            roomy = [
                (worker.pages_foreseen(live.tenant.name, self._settings.ready_seconds), worker)
                for worker in self._able(live, kv_group, workers)
                if worker.load.pages_for_new >= 0
            ]
            spare, best = max(
                ((pages - worker.pages_for(live.need.tokens), worker) for pages, worker in roomy),
                key=lambda found: found[0],
                default=(-1.0, None),
            )
            if spare >= 0:
                return best
        return None

    @property
    def _everyone(self) -> Iterable[Worker]:
        return self._fleet.of_role("decode")

    def _able(self, live: LiveRequest, kv_group: KvGroup, workers: Iterable[Worker]) -> Iterable[Worker]:
        need = live.need
        return (
            worker
            for worker in workers
            if worker.kv_group == kv_group
            and not worker.draining
            and worker.fits(need.tokens_max)
            and need.features <= worker.features
        )

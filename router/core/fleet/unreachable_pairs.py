"""Pairs of workers between which pages could not be fetched lately, although both are up for the router.

Requests whose pages lie on the one go to the other only where no other has room. What failed is believed for a while
only, so that a link which is mended is used again. A worker that most decode workers could not read from is left out of
prefill for that time, if there is another one: hardly anybody could use what it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from router.core.fleet.worker import Worker
from router.core.fleet.workers import Fleet


class UnreachablePairs:
    """Who could not read from whom, until when. Times in seconds."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._until: dict[str, dict[str, float]] = {}  # by peers of holder and reader

    def failed(self, holder: Worker, reader: Worker, now: float) -> None:
        """`reader` could not fetch pages from `holder`."""
        for readers in self._until.values():
            for peer in [peer for peer, until in readers.items() if until <= now]:
                del readers[peer]
        self._until = {peer: readers for peer, readers in self._until.items() if readers}
        self._until.setdefault(holder.peer, {})[reader.peer] = now + self._seconds

    def fetched(self, holder: Worker, reader: Worker) -> bool:
        """… and now it could. Returns whether it could not before."""
        return self._until.get(holder.peer, {}).pop(reader.peer, None) is not None

    def down(self, peer: str) -> None:
        """A worker is gone."""
        self._until.pop(peer, None)
        for readers in self._until.values():
            readers.pop(peer, None)

    def readers(self, holder: Worker, workers: Sequence[Worker], now: float) -> Iterator[Sequence[Worker]]:
        """First those that can be expected to read from `holder`, then the others, if there are any."""
        failed = self._until.get(holder.peer)
        if not failed:
            yield workers
            return
        expected = [worker for worker in workers if failed.get(worker.peer, now) <= now]
        yield expected
        if len(expected) < len(workers):
            yield [worker for worker in workers if worker not in expected]

    def holders(self, workers: Sequence[Worker], fleet: Fleet, now: float) -> Sequence[Worker]:
        """Workers whose pages can be expected to be read; all of `workers`, if none of them takes anything new."""
        if not self._until:
            return workers
        expected = [worker for worker in workers if not self.cut_off(worker, fleet, now)]
        return workers if all(worker.draining for worker in expected) else expected

    def cut_off(self, holder: Worker, fleet: Fleet, now: float) -> bool:
        """Whether most of the decode workers that might read from it could not."""
        failed = self._until.get(holder.peer)
        if not failed:
            return False
        readers = [
            each for each in fleet.of_role("decode") if each.kv_group == holder.kv_group and not each.draining
        ]
        return 2 * sum(failed.get(each.peer, now) > now for each in readers) > len(readers)

"""Pairs of workers between which pages could not be fetched lately, although both are up for the router.

Requests whose pages lie on the one are not sent to the other while there is another way. What failed is believed for a
while only, so that a link which is mended is used again. A worker that several others could not read from is left out
of prefill for that time, if there is another one: nobody could use what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.core.fleet import Worker

READERS_MIN = 2  # that fail to read from a worker: then it is cut off, and not they


class Partitions:
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

    def fetched(self, holder: Worker, reader: Worker) -> None:
        """… and now it could."""
        self._until.get(holder.peer, {}).pop(reader.peer, None)

    def down(self, peer: str) -> None:
        """A worker is gone."""
        self._until.pop(peer, None)
        for readers in self._until.values():
            readers.pop(peer, None)

    def readers(self, holder: Worker, workers: Sequence[Worker], now: float) -> Sequence[Worker]:
        """Those that can be expected to read from `holder`; all of them, if that is none."""
        failed = self._until.get(holder.peer)
        if not failed:
            return workers
        return [worker for worker in workers if failed.get(worker.peer, now) <= now] or workers

    def holders(self, workers: Sequence[Worker], now: float) -> Sequence[Worker]:
        """Those whose pages can be expected to be read; all of them, if that is none."""
        if not self._until:
            return workers
        return [worker for worker in workers if not self._cut_off(worker.peer, now)] or workers

    def _cut_off(self, peer: str, now: float) -> bool:
        return sum(until > now for until in self._until.get(peer, {}).values()) >= READERS_MIN

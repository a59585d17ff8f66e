"""Reads of KV pages between virtual workers: a latency, then bytes divided by a rate, one after the other.

The lease word is read when the last byte has come, as a real fetch does; a read from a dead worker fails. Pages are
copied then, too, if devices have any (`TimedOracle`). Nothing goes wrong by itself: tests/simulation is for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.transfer.protocol import FetchEnded, FetchEvent, FetchFailed, FetchLanded, FetchStale, KvLink
from shared.wire.baton import Baton, Holder
from tests.simulation.oracle.device import Pages
from tests.simulation.world.fabric import FabricWords
from tests.simulation.world.timeline import Action, TimelineProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricSpeed:
    """Of one worker's reads."""

    latency_seconds: float = 0.0005
    bytes_per_second: float = 10e9


@dataclass(slots=True)
class VirtualFabric:
    """All workers' memories, by the name of the agent."""

    speed: FabricSpeed
    fetchers: dict[str, VirtualFetcher] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class VirtualFetcher:
    """The `Fetcher` of one virtual worker."""

    fabric: VirtualFabric
    process: TimelineProcess
    holder: Holder
    words: FabricWords
    on_event: Action  # wakes the worker
    pages: Pages | None = None  # the device's
    fetched_bytes: int = 0
    _busy_until: float = 0.0
    _reads: set[int] = field(default_factory=set)
    _events: list[FetchEvent] = field(default_factory=list)

    def start(self, fetch_id: int, baton: Baton, start_page: int, into: Sequence[int]) -> None:
        speed, now = self.fabric.speed, self.process.now
        size = len(into) * baton.holder.page_bytes
        self._busy_until = max(self._busy_until, now) + size / speed.bytes_per_second
        self._reads.add(fetch_id)
        pages = tuple(zip(baton.pages[start_page:], into, strict=False))
        self.process.at(
            self._busy_until + speed.latency_seconds, lambda: self._end(fetch_id, baton, pages, size, now)
        )

    def abandon(self, fetch_id: int) -> None:
        unpolled = [event for event in self._events if event.fetch_id == fetch_id]
        if fetch_id in self._reads or unpolled:
            self._reads.discard(fetch_id)
            self._events = [event for event in self._events if event not in unpolled]
            self._tell(FetchEnded(fetch_id))

    def poll(self) -> list[FetchEvent]:
        events, self._events = self._events, []
        return events

    def _end(
        self, fetch_id: int, baton: Baton, pages: Sequence[tuple[int, int]], size: int, began: float
    ) -> None:
        if fetch_id not in self._reads:
            return  # abandoned
        self._reads.remove(fetch_id)
        holder = self.fabric.fetchers.get(baton.holder.agent)
        if holder is None or not holder.process.alive:
            self._tell(FetchFailed(fetch_id, "the holder is dead", ended=True))
            return
        self._copy(holder, pages)
        if holder.words.read(baton.lease) != baton.nonce:
            self._tell(FetchStale(fetch_id))
        else:
            self.fetched_bytes += size
            link = KvLink("virtual", self.fabric.speed.bytes_per_second)
            self._tell(FetchLanded(fetch_id, size, self.process.now - began, link))

    def _copy(self, holder: VirtualFetcher, pages: Sequence[tuple[int, int]]) -> None:
        if self.pages is not None and holder.pages is not None:
            for source, target in pages:
                self.pages.copy(target, holder.pages, source)

    def _tell(self, event: FetchEvent) -> None:
        self._events.append(event)
        self.on_event()

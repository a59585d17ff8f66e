"""Fetches between workers of any ranks, while leases end, ranks freeze and die: a seed draws what is done and when.

The fetches are the real ones; bytes move in memory, a span whenever its read is looked at. Each page holds what nothing
else holds. So what has landed is compared with what was leased, and pages of fetches that have ended with what was put
into them then: a byte that is late, of another lease or of another slice is seen.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.transfer.protocol import FetchEnded, FetchEvent, FetchFailed, FetchLanded
from shared.wire.baton import Baton
from tests.doubles.in_process_transfer import InProcessFabric
from tests.fetcher_contract import KV_FORMAT, LEASES, Clock
from tests.unit.transfer.cut_pages import Bytes, Cut
from tests.unit.transfer.ranked_pages import (
    RankedBuffer,
    RankedWorker,
    ServedRanks,
    in_process,
    ranked_worker,
)

HEADS, SLICE_BYTES = 4, 24
POOL, PAGES_MOST = 40, 4
STEPS = 120


class WrongBytesError(AssertionError):
    """What nothing but a mistake in the transfer explains."""


def put(buffer: RankedBuffer, page: int, content: Bytes) -> None:
    """Give each rank its slices of a page: [slices, slice_bytes]."""
    for rank, each in enumerate(buffer.ranks):
        size = each.memory.page_bytes
        each.map[page * size : (page + 1) * size] = buffer.cut.gather(content[None], rank).tobytes()


def holds(buffer: RankedBuffer, page: int, content: Bytes) -> bool:
    """Whether each rank has its slices of the page."""
    for rank, each in enumerate(buffer.ranks):
        size = each.memory.page_bytes
        if each.map[page * size : (page + 1) * size] != buffer.cut.gather(content[None], rank).tobytes():
            return False
    return True


@dataclass(eq=False)
class LeasedPages:
    """A holder, its leases that are free, and its pages that nobody has."""

    worker: RankedWorker
    leases: list[int] = field(default_factory=lambda: list(range(LEASES)))
    pages: list[int] = field(default_factory=lambda: list(range(POOL)))
    frozen: set[str] = field(default_factory=set)
    alive: bool = True

    @property
    def agents(self) -> list[str]:
        holder = self.worker.transfer.holder
        return [holder.agent, *(rank.agent for rank in holder.ranks)]


@dataclass(eq=False)
class RandomFetch:
    """One fetch under way."""

    holder: LeasedPages
    lease: int
    pages: tuple[int, ...]
    into: tuple[int, ...]
    contents: tuple[Bytes, ...]
    leased: bool = True


class RandomRankFetches:
    """The run of a seed. `clears_late` is a mistake of holders: pages are filled anew before the word is cleared."""

    def __init__(self, seed: int, *, clears_late: bool = False):
        self.rng = random.Random(f"{seed} rank fetches")
        self.counts: Counter[str] = Counter()
        self.clears_late = clears_late
        self.turns = self.rng.choice(
            ((0, 1, 1, 2, 4), (0, 0, 0, 0, 0, 1))
        )  # of a told rank, between two polls
        self._bytes = np.random.default_rng(seed)
        self.fabric, self.clock = InProcessFabric(), Clock()
        ranks = (1, 2, 4)
        self.reader = self._worker("d", self.rng.choice(ranks), told=self.rng.random() < 0.5)
        self.holders = [LeasedPages(self._worker(uid, self.rng.choice(ranks))) for uid in "pq"]
        self.free = list(range(POOL))
        self.under_way: dict[int, RandomFetch] = {}
        self.put_away: dict[int, Bytes] = {}  # pages of fetches that have ended, and what they hold since
        self.begun = 0

    def run(self) -> None:
        for _ in range(STEPS):
            self.rng.choices(
                (
                    self._begin,
                    self._poll,
                    self._freeze,
                    self._thaw,
                    self._reuse,
                    self._abandon,
                    self._kill,
                    self._age,
                    self._cut_off,
                ),
                (5, 12, 2, 3, 3, 1, 0.05, 0.7, 0.3),
            )[0]()
        for holder in self.holders:
            for agent in sorted(holder.frozen):
                self.fabric.thaw(agent)
        for _ in range(400):
            self._poll()
            if not self.reader.transfer.outstanding:
                break
            self.clock.now += 0.5
        else:
            raise WrongBytesError(f"fetches {sorted(self.under_way)} do not end")
        self._look()

    # ---- what is done ----

    def _worker(self, uid: str, ranks: int, *, told: bool = False) -> RankedWorker:
        cut = Cut(HEADS, ranks, SLICE_BYTES)
        return ranked_worker(cut, self.clock, in_process(self.fabric, uid), POOL, told=told)

    def _content(self) -> Bytes:
        return self._bytes.integers(0, 256, (HEADS, SLICE_BYTES), dtype=np.uint8)

    def _begin(self) -> None:
        count = self.rng.randint(1, PAGES_MOST)
        able = [each for each in self.holders if each.alive and each.leases and len(each.pages) >= count]
        if not able or len(self.free) < count:
            return
        holder = self.rng.choice(able)
        pages = tuple(holder.pages.pop(self.rng.randrange(len(holder.pages))) for _ in range(count))
        into = tuple(self.free.pop(self.rng.randrange(len(self.free))) for _ in range(count))
        contents = tuple(self._content() for _ in pages)
        for page, content in zip(pages, contents, strict=True):
            put(holder.worker.buffer, page, content)
        for page in into:
            self.put_away.pop(page, None)
        lease, nonce = holder.leases.pop(), self.rng.getrandbits(63) | 1
        words = holder.worker.transfer.words
        words.write(lease, nonce, pages)
        self.begun += 1
        self.under_way[self.begun] = RandomFetch(holder, lease, pages, into, contents)
        baton = Baton("r", 1, holder.worker.transfer.holder, KV_FORMAT, lease, nonce, 1, 1, pages)
        self.reader.transfer.start(self.begun, baton, 0, into)

    def _freeze(self) -> None:
        holder = self.rng.choice(self.holders)
        agent = self.rng.choice(holder.agents)
        if holder.alive and agent not in holder.frozen:
            holder.frozen.add(agent)
            self.fabric.freeze(agent)
            self.counts["ranks frozen"] += 1

    def _thaw(self) -> None:
        holder = self.rng.choice(self.holders)
        if holder.frozen:
            agent = self.rng.choice(sorted(holder.frozen))
            holder.frozen.discard(agent)
            self.fabric.thaw(agent)

    def _reuse(self) -> None:
        """End the lease of a fetch under way, and fill its pages anew at once; reads may come between."""
        leased = [each for each in self.under_way.values() if each.leased and each.holder.alive]
        if leased:
            self._end_lease(self.rng.choice(leased))

    def _end_lease(self, fetch: RandomFetch) -> None:
        fetch.leased = False
        words = fetch.holder.worker.transfer.words
        if not self.clears_late:
            words.clear(fetch.lease)
        for page in fetch.pages:
            put(fetch.holder.worker.buffer, page, self._content())
        if self.clears_late:
            self._poll()
            words.clear(fetch.lease)
        fetch.holder.leases.append(fetch.lease)
        fetch.holder.pages += fetch.pages
        self.counts["leases ended"] += 1

    def _abandon(self) -> None:
        if self.under_way:
            self.reader.transfer.abandon(self.rng.choice(sorted(self.under_way)))

    def _kill(self) -> None:
        """One rank dies, and the others with it a moment later."""
        holder = self.rng.choice(self.holders)
        if holder.alive:
            holder.alive = False
            holder.frozen.clear()
            for agent in self.rng.sample(holder.agents, len(holder.agents)):
                self.fabric.kill(agent)
                self._poll()
            self.counts["holders lost"] += 1

    def _age(self) -> None:
        self.clock.now += 6.0

    def _cut_off(self) -> None:
        """New reads of one rank are refused for a few polls; those under way go on."""
        agent = self.rng.choice(self.rng.choice(self.holders).agents)
        self.fabric.unreachable.add(agent)
        for _ in range(3):
            self._begin()
            self._poll()
        self.fabric.unreachable.discard(agent)
        self.counts["ranks cut off"] += 1

    def _poll(self) -> None:
        if self.reader.served:
            self._serve(self.reader.served)
        for event in self.reader.transfer.poll():
            self._take(event)

    def _serve(self, ranks: ServedRanks) -> None:
        """Ranks in processes of their own have turns of theirs: some none, some several."""
        for service in ranks.services:
            for _ in range(self.rng.choice(self.turns)):
                service.turn(0)
                self.counts["turns of told ranks"] += 1

    # ---- what comes of it ----

    def _take(self, event: FetchEvent) -> None:
        fetch = self.under_way.get(event.fetch_id)
        if fetch is None:
            return
        if isinstance(event, FetchFailed) and "other bytes" in event.reason:
            raise WrongBytesError(event.reason)
        self.counts[type(event).__name__] += 1
        if isinstance(event, FetchFailed) and not event.ended:
            return
        if isinstance(event, FetchLanded):
            self._compare(fetch)
        elif not isinstance(event, FetchEnded | FetchFailed) and fetch.leased:
            raise WrongBytesError("stale, and the lease holds")
        del self.under_way[event.fetch_id]
        if fetch.leased and fetch.holder.alive:
            self._end_lease(fetch)
        self._put_away(fetch.into)

    def _compare(self, fetch: RandomFetch) -> None:
        for page, content in zip(fetch.into, fetch.contents, strict=True):
            if not holds(self.reader.buffer, page, content):
                raise WrongBytesError(f"page {page} has landed with other bytes")

    def _put_away(self, pages: Sequence[int]) -> None:
        """They are another's now: nothing may land in them."""
        for page in pages:
            self.put_away[page] = self._content()
            put(self.reader.buffer, page, self.put_away[page])
            self.free.append(page)
        self._look()

    def _look(self) -> None:
        for page, content in self.put_away.items():
            if not holds(self.reader.buffer, page, content):
                raise WrongBytesError(f"bytes have landed in page {page} after the end of its fetch")

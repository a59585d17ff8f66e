"""Real fetches over each transport, each page of each compared: no wrong byte under faults, aborts and reuse.

    start ── a page ── a page ── … ── Landed: all its bytes are those that were leased, or the fetch is wrong
        │ given up                         Ended: its targets are another's now, and stay as that one leaves them
        │ the lease ends, its pages are filled anew at once: Stale
        └ the holder is frozen, or killed: the fetch waits, or Failed

Holders are processes of their own (those of `memory` are in this one) and lease a few of their pages, filled with what
nothing else is filled with. A seed draws what is done; which fetch it hits, and where in it, is up to the machine.

    python -m tests.proofs.fetches --fetches 100000
    UCX_TLS=tcp python -m tests.proofs.fetches --ways nixl
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Protocol

from shared.transfer.fetches import FetchLimits
from shared.transfer.protocol import (
    FetchEnded,
    FetchEvent,
    FetchFailed,
    FetchLanded,
    FetchStale,
    KvTransport,
)
from shared.transfer.transfer import Transfer
from shared.transfer.transports import open_offer
from shared.wire.baton import Baton
from tests.doubles.in_process_transfer import InProcessFabric, InProcessOffer
from tests.fetcher_contract import KV_FORMAT, LEASES, PAGES, HolderUnderTest, PageBuffer
from tests.integration.transfer.holder_processes import HolderProcess, epochs, network, worker_keys
from tests.proofs.proof import Promise, ProofResult
from tests.unit.transfer.in_process_world import InProcessHolder

WAYS = ("memory", "tls", "nixl")
PAGE_BYTES = 16 * 1024
LIMITS = FetchLimits(
    fetches_max=16, fetch_seconds_max=20.0, quarantine_seconds=1.0, read_batch_bytes=PAGE_BYTES
)
HOLDERS = 2
UNDER_WAY = 8  # fetches at a time
PAGES_MOST = 8  # of a fetch
WATCHED = 64  # pages of ended fetches that are another's, and looked at later
FROZEN_SECONDS = 0.02
PAUSE_SECONDS = 0.0002  # where nothing has happened


class LeasingHolder(HolderUnderTest, Protocol):
    def write(self, lease: int, nonce: int, pages: Sequence[int] = ()) -> None: ...
    def stamp(self, nonce: int, pages: Sequence[int]) -> None: ...


@dataclass(slots=True, eq=False)
class LeasedPages:
    """A holder, and what of it is not leased."""

    source: LeasingHolder
    leases: list[int] = field(default_factory=lambda: list(range(LEASES)))
    pages: deque[int] = field(default_factory=lambda: deque(range(PAGES)))
    thaws_at: float = 0.0  # it is frozen until then; 0.0: it is not
    returned: list[tuple[int, Sequence[int]]] = field(
        default_factory=list
    )  # leases and pages, while it is frozen

    def give_back(self, lease: int, pages: Sequence[int]) -> None:
        """The lease has ended, as soon as the holder can be told."""
        self.returned.append((lease, pages))
        if not self.thaws_at:
            self.tell()

    def tell(self) -> None:
        """End the leases that were given back."""
        for lease, pages in self.returned:
            self.source.clear(lease)
            self.leases.append(lease)
            self.pages += pages
        self.returned.clear()

    def thaw(self) -> None:
        """It goes on."""
        self.thaws_at = 0.0
        self.source.thaw()
        self.tell()


@dataclass(slots=True, eq=False)
class RealFetch:
    """One fetch under way."""

    holder: LeasedPages
    lease: int
    nonce: int
    pages: tuple[int, ...]
    into: tuple[int, ...]
    given_up: bool = False
    reused: bool = False  # its lease has ended, and its pages are filled anew


class FetchRun:
    """All fetches over one transport."""

    def __init__(self, way: str, fetches: int, kills: int, seed: int):
        self.counts: Counter[str] = Counter()
        self._fetches, self._rng = fetches, random.Random(f"{seed} {way}")
        self._kills = deque(sorted(self._rng.randrange(fetches) for _ in range(kills)))
        self._buffer = PageBuffer(PAGES, PAGE_BYTES)
        self._reader, self._new_holder = _open(way, self._buffer)
        self._holders = [LeasedPages(self._new_holder()) for _ in range(HOLDERS)]
        self._free = deque(range(PAGES))
        self._under_way: dict[int, RealFetch] = {}
        self._watched: deque[tuple[int, int]] = deque()  # pages, and the nonces that they are stamped with
        self._ids = count(1)

    def run(self) -> None:
        """Begin all fetches, and wait until the last has ended."""
        pause = threading.Event()
        while self.counts["begun"] < self._fetches or self._under_way:
            while len(self._under_way) < UNDER_WAY and self.counts["begun"] < self._fetches and self._begin():
                pass
            self._disturb()
            events = self._reader.poll()
            for event in events:
                self._take(event)
            if not events:
                pause.wait(PAUSE_SECONDS)
        while self._watched:
            self._look()

    def close(self) -> None:
        """End the reader and all holders."""
        self._reader.close()
        for holder in self._holders:
            holder.source.kill()

    # ---- what is done ----

    def _begin(self) -> bool:
        """Lease some pages at a holder and fetch them; False if all holders are frozen, or have all leased."""
        rng, size = self._rng, self._rng.randint(1, PAGES_MOST)
        able = [
            each for each in self._holders if not each.thaws_at and each.leases and len(each.pages) >= size
        ]
        if not able or len(self._free) < size:
            return False
        holder = rng.choice(able)
        lease, nonce = holder.leases.pop(), rng.getrandbits(64) | 1
        pages = tuple(holder.pages.popleft() for _ in range(size))
        into = tuple(self._free.popleft() for _ in range(size))
        holder.source.stamp(nonce, pages)
        holder.source.write(lease, nonce, pages)
        fetch_id = next(self._ids)
        self._under_way[fetch_id] = RealFetch(holder, lease, nonce, pages, into)
        baton = Baton("r", 2, holder.source.holder, KV_FORMAT, lease, nonce, 1, 1, pages)
        self._reader.start(fetch_id, baton, 0, into)
        self.counts["begun"] += 1
        return True

    def _disturb(self) -> None:
        """Give one up, end the lease of one, freeze or kill a holder: each now and then."""
        rng, now = self._rng, time.monotonic()
        for holder in self._holders:
            if holder.thaws_at and now >= holder.thaws_at:
                holder.thaw()
        if self._kills and self.counts["begun"] > self._kills[0]:
            self._kills.popleft()
            self._kill(rng.randrange(HOLDERS))
        if not self._under_way:
            return
        fetch_id, fetch = rng.choice(list(self._under_way.items()))
        chance = rng.random()
        if chance < 0.1 and not fetch.given_up:
            fetch.given_up = True
            self.counts["given up"] += 1
            self._reader.abandon(fetch_id)
        elif chance < 0.25 and not fetch.reused and not fetch.holder.thaws_at:
            fetch.reused = True
            self.counts["leases ended, and their pages filled anew"] += 1
            fetch.holder.source.clear(fetch.lease)
            fetch.holder.source.stamp(rng.getrandbits(64), fetch.pages)
        elif chance < 0.2505 and not fetch.holder.thaws_at:
            self.counts["holders frozen"] += 1
            fetch.holder.source.freeze()
            fetch.holder.thaws_at = now + FROZEN_SECONDS

    def _kill(self, number: int) -> None:
        self.counts["holders killed"] += 1
        if self._holders[number].thaws_at:
            self._holders[number].thaw()
        self._holders[number].source.kill()
        self._holders[number].thaws_at = float("inf")  # nobody talks to it
        self._holders[number] = LeasedPages(self._new_holder())

    # ---- what comes of it ----

    def _take(self, event: FetchEvent) -> None:
        if isinstance(event, FetchFailed) and not event.ended:
            self.counts["failed, ended later"] += 1
            self._under_way[event.fetch_id].given_up = True
            return
        fetch = self._under_way.pop(event.fetch_id)
        right = all(self._buffer.stamped(page, fetch.nonce, number) for number, page in enumerate(fetch.into))
        match event:
            case FetchLanded():
                self.counts["landed"] += 1
                self.counts["pages compared"] += len(fetch.into)
                self.counts["landed with a wrong byte"] += not right
            case FetchStale():
                self.counts["stale"] += 1
                self.counts["stale without a reason"] += not fetch.reused
                self.counts["stale, with another's bytes"] += not right
            case FetchFailed():
                self.counts["failed"] += 1
            case FetchEnded():
                self.counts["ended late"] += 1
        fetch.holder.give_back(fetch.lease, fetch.pages)
        self._reuse(fetch.into)

    def _reuse(self, pages: Sequence[int]) -> None:
        """Nothing can land in them: they are another's now, and looked at before the next fetch gets them."""
        for page in pages:
            nonce = self._rng.getrandbits(64)
            self._buffer.stamp(page, nonce, 0)
            self._watched.append((page, nonce))
        while len(self._watched) > WATCHED:
            self._look()

    def _look(self) -> None:
        page, nonce = self._watched.popleft()
        self.counts["reused pages looked at"] += 1
        self.counts["reused pages with a wrong byte"] += not self._buffer.stamped(page, nonce, 0)
        self._free.append(page)


def _open(way: str, buffer: PageBuffer) -> tuple[Transfer, Callable[[], LeasingHolder]]:
    """A reader, and what makes holders that it reads from."""
    if way == "memory":
        fabric = InProcessFabric()
        names = (f"holder{number}" for number in count())
        offer = InProcessOffer(fabric, "reader", 1, buffer.memory, LEASES)
        reader = Transfer(offer, buffer.memory, KV_FORMAT, limits=LIMITS, clock=time.monotonic)
        kept: list[InProcessHolder] = []  # batons hold addresses of their memory

        def make() -> InProcessHolder:
            kept.append(InProcessHolder(fabric, next(names), time.monotonic, PAGE_BYTES))
            return kept[-1]

        return reader, make
    transport: KvTransport = "tls" if way == "tls" else "nixl"
    real = open_offer(network(transport), worker_keys(), ("reader", next(epochs)), buffer.memory, LEASES)
    reader = Transfer(real, buffer.memory, KV_FORMAT, limits=LIMITS, clock=time.monotonic)
    return reader, lambda: HolderProcess("holder", next(epochs), PAGES, PAGE_BYTES, transport)


def prove(ways: Sequence[str], fetches: int, kills: int, seed: int) -> ProofResult:
    """Fetch by each way, and say what has landed."""
    promises: list[Promise] = []
    seen: dict[str, object] = {}
    for way in ways:
        run, began = FetchRun(way, fetches, kills, seed), time.monotonic()
        try:
            run.run()
        finally:
            run.close()
        counts = run.counts
        seen |= {f"{way}: {name}": number for name, number in counts.items() if number}
        seen[f"{way}: seconds"] = round(time.monotonic() - began, 1)
        promised = partial(Promise, least=0, most=0)
        promises += [
            Promise(f"{way}: fetches", counts["begun"], least=fetches),
            promised(f"{way}: landed with a wrong byte", counts["landed with a wrong byte"]),
            promised(f"{way}: reused pages with a wrong byte", counts["reused pages with a wrong byte"]),
            promised(f"{way}: stale without a reason", counts["stale without a reason"]),
        ]
    return ProofResult(tuple(promises), seen)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.proofs.fetches",
        description="Fetches KV pages over each transport while holders end leases, freeze and die.",
    )
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--fetches", type=int, default=100_000, help="over each transport")
    parser.add_argument("--kills", type=int, default=10, help="holders to kill, of each transport")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    return prove(options.ways, options.fetches, options.kills, options.seed).show()


if __name__ == "__main__":
    sys.exit(main())

"""A worker's whole transfer: what it offers to others, and its fetches from them. Implements `Fetcher`.

A transport (`nixl`, `tls`) gives an `Offer`, which also makes its readers; the rest is the same for all of them and
lies in `fetches`. `self_fetch` is the check before a worker is ready. Knows no transport. A transfer belongs to one
thread, the worker's loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from shared.primitives.errors import TransferError
from shared.transfer.counters import KvCounters
from shared.transfer.fetches import Fetches, FetchLimits
from shared.transfer.kv_links import KvLinks
from shared.transfer.memory import PageMemory
from shared.transfer.offer import Offer, describe_rank
from shared.transfer.protocol import Fetcher, FetchEvent, FetchLanded, LeaseWords
from shared.transfer.rank_reader import Begin, PartReader, RankReader, WorkerReader, make_here, make_on_thread
from shared.wire.baton import Baton, Holder, HolderRank


class FurtherRank(Protocol):
    """A rank of this worker other than 0: it offers its own pages, and reads into them."""

    @property
    def described(self) -> HolderRank:
        """How other workers reach its pages."""

    @property
    def counters(self) -> KvCounters:
        """What has happened at its port, as far as it is known here."""

    def make_reader(self) -> PartReader:
        """A fresh reader of this rank."""

    def close(self) -> None:
        """From now on no other worker can read from this rank."""


class RankHere:
    """A further rank in this process. Implements `FurtherRank`.

    Its offer answers for the leases of rank 0's: by NIXL nobody asks it, by TLS it has the same `Grants`.
    """

    def __init__(self, offer: Offer, pages: PageMemory):
        self._offer = offer
        self._pages = pages
        self.described = describe_rank(offer.holder, pages)
        self.counters = offer.counters
        if pages.known_pages:
            pages.write_known_bytes(pages.known_page)

    def make_reader(self) -> RankReader:
        """See `FurtherRank`. Rank 0 reads the words, so one slot for them is more than enough."""
        return RankReader(self._offer.make_reader(1), self._pages)

    def close(self) -> None:
        """See `FurtherRank`."""
        self._offer.close()


class Transfer:
    """Fetches pages by one transport, and offers this worker's own. Implements `Fetcher`; `words` is its `LeaseWords`.

    `offer` and `pages` are rank 0's; `ranks` are 1, 2 … The page memory must stay where it is until `close`.
    """

    def __init__(
        self,
        offer: Offer,
        pages: PageMemory,
        kv_format: str,
        *,
        limits: FetchLimits,
        clock: Callable[[], float],
        ranks: Sequence[FurtherRank] = (),
    ):
        self._offer = offer
        self._pages = pages
        self._ranks = tuple(ranks)
        self._slots = limits.fetches_max
        self.words = offer.words
        described = tuple(rank.described for rank in ranks)
        self._holder = msgspec.structs.replace(offer.holder, ranks=described)
        begin: Begin = partial(make_on_thread, pages) if pages.memory == "VRAM" else make_here
        self._fetches = Fetches(
            self._holder, pages, kv_format, self._make_reader, limits, clock, offer.counters, begin
        )

    @property
    def holder(self) -> Holder:
        """See `Fetcher.holder`."""
        return self._holder

    @property
    def counters(self) -> KvCounters:
        """What has happened at the ports of all ranks so far."""
        return self._offer.counters.with_others(rank.counters for rank in self._ranks)

    @property
    def outstanding(self) -> int:
        """Fetches that have not ended: while above 0, poll rather than block."""
        return self._fetches.outstanding

    @property
    def kv_links(self) -> KvLinks:
        """What is known of the links to the workers that were read from."""
        return self._fetches.kv_links

    @property
    def readers_fenced(self) -> int:
        """How often a reader was closed to end reads that nothing else ended."""
        return self._fetches.readers_fenced

    def start(self, fetch_id: int, baton: Baton, start_page: int, into: Sequence[int]) -> None:
        """See `Fetcher.start`."""
        self._fetches.start(fetch_id, baton, start_page, into)

    def abandon(self, fetch_id: int) -> None:
        """See `Fetcher.abandon`."""
        self._fetches.abandon(fetch_id)

    def poll(self) -> list[FetchEvent]:
        """See `Fetcher.poll`. Costs a microsecond when nothing is outstanding."""
        return self._fetches.poll()

    def close(self) -> None:
        """Nothing lands here any more, and no other worker can read from here."""
        self._fetches.close()
        self._offer.close()
        for rank in self._ranks:
            rank.close()

    def _make_reader(self) -> WorkerReader:
        own = RankReader(self._offer.make_reader(self._slots), self._pages)
        others: list[PartReader] = []
        try:
            for rank in self._ranks:
                others.append(rank.make_reader())
        except TransferError:
            WorkerReader(own, others).close()
            raise
        return WorkerReader(own, others)


FETCH_ID = 0
TARGET = 0  # any page of the pool: none is in use yet
WAIT_SECONDS = 0.001


class _Transfer(Fetcher, Protocol):
    @property
    def words(self) -> LeaseWords: ...


def self_fetch(
    transfer: _Transfer,
    pages: PageMemory,
    kv_format: str,
    *,
    seconds_max: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Fetch the known page into one of the pool. Returns the transport that carried it.

    Call it before anything else uses the pages and the words. `TransferError` in one sentence when the page does
    not land, or lands with other bytes: that is compared by every first fetch from a worker, see `fetches`.
    """
    nonce = transfer.words.open(0, (pages.known_page,))
    baton = Baton("self-fetch", 0, transfer.holder, kv_format, 0, nonce, 1, 1, (pages.known_page,))
    transfer.start(FETCH_ID, baton, 0, [TARGET])
    landed = _wait(transfer, clock() + seconds_max, clock)
    transfer.words.clear(0)
    if not isinstance(landed, FetchLanded) or landed.link is None:
        raise TransferError(
            f"the self-fetch of a KV page ended with {landed!r}: can the KV ports be used here?"
        )
    return landed.link.transport


def _wait(transfer: Fetcher, deadline: float, clock: Callable[[], float]) -> FetchEvent | None:
    while clock() < deadline:
        if events := transfer.poll():
            return events[-1]
        time.sleep(WAIT_SECONDS)
    return None

"""Fetching pages from another worker: after a prefill, and for a migration.

A fetch reads a baton's pages into pages of the reader; when all those reads are DONE, it reads the lease word. The
holder takes no part and is not notified: the router's `Release` ends the lease. **Only DONE proves that a read has
ended**: after `FetchFailed` or `abandon` bytes may still land, so the target pages stay quarantined until `FetchEnded`
for the same fetch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from shared.wire.baton import Baton, Holder

KvTransport = Literal["auto", "nixl", "tls"]  # what carries the bytes, see `transports`


@dataclass(frozen=True, slots=True)
class KvLink:
    """How this worker reads from a peer."""

    transport: str  # the one really used: "cma/memory", "tcp/eth0"
    bytes_per_second: float  # the best of the last fetches of at least 1 MiB; 0: there was none


@dataclass(frozen=True, slots=True)
class FetchLanded:
    """All pages have arrived and the lease held: the target pages are valid. The fetch has ended."""

    fetch_id: int
    fetched_bytes: int
    seconds: float
    link: KvLink | None = None  # None: the peer was never checked


@dataclass(frozen=True, slots=True)
class FetchStale:
    """All reads are done, but the lease had ended: the bytes are worthless. The fetch has ended."""

    fetch_id: int


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The fetch will not land. Unless `ended`, bytes may still arrive: quarantine the target pages."""

    fetch_id: int
    reason: str
    ended: bool


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """After `FetchFailed(ended=False)` or `abandon`: from now on nothing of this fetch lands any more."""

    fetch_id: int


FetchEvent = FetchLanded | FetchStale | FetchFailed | FetchEnded


class Fetcher(Protocol):
    """Reads pages out of other workers' memory into this worker's pages, and offers its own to be read."""

    @property
    def holder(self) -> Holder:
        """How other workers reach this worker's pages: goes into every baton made here."""

    def start(self, fetch_id: int, baton: Baton, start_page: int, into: Sequence[int]) -> None:
        """Read the baton's pages from page `start_page` of the request on into the local pages `into`.

        `len(into)` pages are read; it may be 0 (everything is cached here: only the lease word is read). Never
        blocks on a peer and never raises because of one: a failure comes back as `FetchFailed`.
        """

    def abandon(self, fetch_id: int) -> None:
        """The pages are no longer wanted. `FetchEnded` follows when nothing can land any more; no other event does.

        It replaces an event that has not been polled. Nothing follows for a fetch whose last event was polled before.
        """

    def poll(self) -> list[FetchEvent]:
        """The events since the last call, oldest first. Fetches advance only here: call it while any is outstanding."""


class LeaseWords(Protocol):
    """The words that prove leases: 8 bytes each, 0 for a lease that does not live."""

    def open(self, lease: int, pages: Sequence[int]) -> int:
        """Set the word to a fresh nonce, and return it: from now on a baton with this nonce and these pages is valid.

        A nonce has 64 bits, is never 0, and nobody can guess it. The caller leaves `pages` as they are.
        """

    def clear(self, lease: int) -> None:
        """Zero the word: every baton of this lease is stale from now on. Always before the pages are unlocked."""

    def __len__(self) -> int:
        """How many leases there can be at a time."""

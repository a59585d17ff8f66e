"""Leases: how long the pages of a finished prefill stay locked for whoever holds their baton.

A lease binds a request's locked pages to one *word* in memory that readers can see (`shared.baton` draws the
timeline). Ending a lease clears the word first; only then may the caller unlock the pages. A lease ends by
`Release`, by `Cancel`, when its router is gone, or `lease_seconds` after its last renewal. There are as many leases
at a time as there are words.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from shared.errors import InvariantError
from shared.req import Req
from shared.transfer.protocol import LeaseWords, PagesRead


@dataclass(slots=True, eq=False)
class Lease:
    """The pages of `req` are locked until `expires_at` (seconds on the worker's own clock)."""

    index: int
    nonce: int
    req: Req
    expires_at: float
    collected: int = 0  # readers that have read the word and need the pages no more


class Leases:
    """All leases of one worker, by request id."""

    def __init__(self, words: LeaseWords, epoch: int, lease_seconds: float):
        self._words = words
        self._lease_seconds = lease_seconds
        self._free = deque(range(len(words)))
        self._by_rid: dict[str, Lease] = {}
        self._holds: Counter[int] = Counter()  # leases by page
        self._next_nonce = (epoch & 0xFFFF_FFFF) << 32 | 1  # never 0; never again within this epoch

    def __len__(self) -> int:
        return len(self._by_rid)

    @property
    def free(self) -> int:
        """How many more leases can be granted now."""
        return len(self._free)

    @property
    def pages(self) -> int:
        """Pages held by leases, one that several hold counted once."""
        return len(self._holds)

    def grant(self, req: Req, now: float) -> Lease:
        """Lease the request's pages; the caller has made sure that a word is free."""
        if req.rid in self._by_rid:
            raise InvariantError(f"request {req.rid} already has a lease")
        lease = Lease(self._free.popleft(), self._next_nonce, req, now + self._lease_seconds)
        self._next_nonce += 1
        self._words.write(lease.index, lease.nonce)
        self._by_rid[req.rid] = lease
        self._holds.update(req.pages)
        return lease

    def all(self) -> list[Lease]:
        """The living leases, oldest first."""
        return list(self._by_rid.values())

    def find(self, rid: str) -> Lease | None:
        """The lease of this request, of whatever attempt."""
        return self._by_rid.get(rid)

    def of(self, rid: str, attempt: int) -> Lease | None:
        """The lease of this attempt, if it still lives."""
        lease = self._by_rid.get(rid)
        return lease if lease is not None and lease.req.attempt == attempt else None

    def of_router(self, router: str) -> list[Lease]:
        """The leases granted to requests of this router, oldest first."""
        return [lease for lease in self._by_rid.values() if lease.req.router == router]

    def renew(self, rid: str, attempt: int, now: float) -> None:
        """Postpone the end; without effect when the lease has ended."""
        if lease := self.of(rid, attempt):
            lease.expires_at = now + self._lease_seconds

    def collect(self, event: PagesRead) -> bool:
        """A reader is done. False: the notification is of a lease that has ended."""
        lease = self.of(event.rid, event.attempt)
        if lease is None or lease.nonce != event.nonce:
            return False
        lease.collected += 1
        return True

    def end(self, lease: Lease) -> Req:
        """Clear the word. From the return on, and not before, the caller may unlock the request's pages."""
        assert self._by_rid[lease.req.rid] is lease
        self._words.clear(lease.index)
        del self._by_rid[lease.req.rid]
        self._free.append(lease.index)
        for page in lease.req.pages:
            self._holds[page] -= 1
            if not self._holds[page]:
                del self._holds[page]
        return lease.req

    def expired(self, now: float) -> list[Lease]:
        """Leases whose time is over, oldest first."""
        return [lease for lease in self._by_rid.values() if lease.expires_at <= now]

    def next_expiry(self) -> float | None:
        """When the next lease ends by itself."""
        return min((lease.expires_at for lease in self._by_rid.values()), default=None)

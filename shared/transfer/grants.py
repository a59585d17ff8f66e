"""What each lease opens, and to whom: the rules by which a holder answers the reads of other workers.

A lease opens its own pages, to whoever knows its nonce, for as long as it lives. So a reader must bring the nonce, and
is told whether it is right; it is never told the nonce itself:

    open(lease, pages) ──► nonce ── in the baton, by way of the router ──► reader
                                    pages(lease, nonce, …) ── holds(lease, nonce) ──┘
    clear(lease)                                                     nothing is given any more

Readers of the release before do not bring the nonce when they ask for the word: they compare it themselves (`tell`).
One that has read pages on this connection has shown that it knows the nonce, and learns nothing by the answer. Another
is told the word once, for a reader that has all pages cached needs nothing else; but from then on the lease has ended
for every connection that had not shown the nonce before. So what `tell` gives away opens nothing; and pages that were
not given are never followed by the answer that the lease holds, which the reader would take for a proof of them.

Knows no bytes, no sockets and no clock. Reads come from many threads; a lease is one object that is put into its place
by one store, and `disclosed` is set before the word is given, so no lock is needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from shared.transfer.memory import new_nonce

Shown = dict[int, int]  # by lease, the nonce that one connection has shown to know: at most one a lease


class Verdict(Enum):
    """What becomes of a read of pages."""

    GIVEN = "given"
    GONE = "gone"  # the lease has ended, at least for this connection
    BEYOND = "beyond"  # pages that are not the lease's


class Grant:
    """The pages of one lease."""

    __slots__ = ("_pages", "_runs", "disclosed", "nonce")

    def __init__(self, nonce: int, pages: Sequence[int]):
        self.nonce = nonce
        self.disclosed = False  # to a connection that had not shown that it knows the nonce
        self._pages = pages
        self._runs: tuple[list[int], list[int]] | None = None

    def covers(self, pages: range) -> bool:
        """Whether all of the pages, neighbours in the pool, are the lease's."""
        if self._runs is None:
            self._runs = _runs_of(self._pages)  # by the first read: the worker's loop has no time for it
        begins, ends = self._runs
        run = bisect_right(begins, pages.start) - 1
        return run >= 0 and pages.stop <= ends[run]


def _runs_of(pages: Sequence[int]) -> tuple[list[int], list[int]]:
    """The first page of each run of neighbours, and the page behind it."""
    begins: list[int] = []
    ends: list[int] = []
    for page in sorted(set(pages)):
        if ends and ends[-1] == page:
            ends[-1] = page + 1
        else:
            begins.append(page)
            ends.append(page + 1)
    return begins, ends


class Grants:
    """The leases of one worker, as its readers see them. Implements `LeaseWords`."""

    def __init__(self, leases: int, new_nonce: Callable[[], int] = new_nonce):
        self._grants: list[Grant | None] = [None] * leases
        self._new_nonce = new_nonce

    def __len__(self) -> int:
        return len(self._grants)

    # ---- the worker's loop ---------------------------------------------------------------------------------------

    def open(self, lease: int, pages: Sequence[int]) -> int:
        """See `LeaseWords`."""
        nonce = self._new_nonce()
        self.write(lease, nonce, pages)
        return nonce

    def write(self, lease: int, nonce: int, pages: Sequence[int]) -> None:
        """Open the pages under a nonce of the caller's."""
        assert nonce != 0, "0 is the word of no lease"
        assert self._grants[lease] is None, f"lease {lease} is in use"
        self._grants[lease] = Grant(nonce, pages)

    def clear(self, lease: int) -> None:
        """See `LeaseWords`."""
        self._grants[lease] = None

    # ---- readers -------------------------------------------------------------------------------------------------

    def read(self, lease: int) -> int:
        """The lease's word: its nonce while it lives, else 0. Not for readers."""
        grant = self.grant(lease)
        return grant.nonce if grant else 0

    def grant(self, lease: int) -> Grant | None:
        """The lease if it lives."""
        return self._grants[lease]

    def holds(self, shown: Shown, lease: int, nonce: int) -> bool:
        """Whether the lease lives under this nonce, for this connection."""
        return self._find(shown, lease, nonce) is not None

    def pages(self, shown: Shown, lease: int, nonce: int, spans: Iterable[range]) -> Verdict:
        """Whether the connection may read these pages now. What is given stays open to it while `holds`."""
        grant = self._find(shown, lease, nonce)
        if grant is None:
            return Verdict.GONE
        return Verdict.GIVEN if all(map(grant.covers, spans)) else Verdict.BEYOND

    def tell(self, shown: Shown, lease: int) -> int:
        """The word, for a connection of the release before; 0 if there is no lease, or its word was told to another."""
        grant = self.grant(lease)
        if grant is None:
            return 0
        if shown.get(lease) != grant.nonce:
            if grant.disclosed:
                return 0
            grant.disclosed = True
        return grant.nonce

    def _find(self, shown: Shown, lease: int, nonce: int) -> Grant | None:
        grant = self.grant(lease)
        if grant is None or grant.nonce != nonce:
            return None
        if shown.get(lease) != nonce:
            if grant.disclosed:
                return None
            shown[lease] = nonce
        return grant

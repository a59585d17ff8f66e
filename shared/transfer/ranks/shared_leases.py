"""The leases of a worker of several ranks, in memory that all of them map: rank 0 writes, the others look.

    words    8 bytes a lease    the nonce while the lease lives, else 0
    counts   8 bytes a lease    how many pages it has
    pages    4 bytes a page     `pages_max` a lease

So a lease is open at all ranks by one store, before anybody is told its nonce, and ends at all of them by one store,
before its pages are unlocked: no rank hears of it later than another. Rank 0 writes the pages of a lease while its word
is 0, and the word last. Whoever looks takes the word, then the pages, then the word again.

Knows no readers: `grants` has the rules by which they are answered. One is left out: no rank tells a word. Readers of
the release before cannot read slices, so none of them asks; and a word that one rank had told would open the pages of
all others, which do not hear of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.transfer.grants import Grant, Grants, Shown
from shared.transfer.memory import WORD_BYTES

_PAGE = np.dtype(np.int32)


class SharedLeases:
    """The table in a memory, which whoever made it must keep."""

    def __init__(self, memory: memoryview, leases: int, pages_max: int):
        """`memory`: `bytes_for(leases, pages_max)` of them, zeroed when rank 0 begins."""
        self.leases, self.pages_max = leases, pages_max
        numbers = memory[: 2 * WORD_BYTES * leases].cast("Q")
        self._words, self._counts = numbers[:leases], numbers[leases:]
        self._pages = np.frombuffer(memory[2 * WORD_BYTES * leases :], dtype=_PAGE).reshape(leases, pages_max)

    @staticmethod
    def bytes_for(leases: int, pages_max: int) -> int:
        """The size of a table; what no lease has used takes no memory."""
        return leases * (2 * WORD_BYTES + pages_max * _PAGE.itemsize)

    def open(self, lease: int, nonce: int, pages: Sequence[int]) -> None:
        """Rank 0: these pages are open to whoever knows the nonce."""
        assert self._words[lease] == 0, f"lease {lease} is in use"
        self._pages[lease, : len(pages)] = pages
        self._counts[lease] = len(pages)
        self._words[lease] = nonce

    def clear(self, lease: int) -> None:
        """Rank 0: the lease has ended."""
        self._words[lease] = 0

    def word(self, lease: int) -> int:
        """The nonce, or 0."""
        return self._words[lease]

    def pages(self, lease: int) -> list[int]:
        """Pages of the lease; those of another one, if the word has changed meanwhile."""
        count = min(self._counts[lease], self.pages_max)
        found: list[int] = self._pages[lease, :count].tolist()
        return found


class RankGrants(Grants):
    """The leases of a worker as one of its ranks answers for them."""

    def tell(self, shown: Shown, lease: int) -> int:
        """See `Grants`. Nobody is told a word."""
        del shown, lease
        return 0


class WrittenGrants(RankGrants):
    """Rank 0's leases, which the other ranks see in the table."""

    def __init__(self, table: SharedLeases):
        super().__init__(table.leases)
        self._table = table

    def write(self, lease: int, nonce: int, pages: Sequence[int]) -> None:
        """See `Grants`. Whoever is given the nonce finds the lease at every rank."""
        self._table.open(lease, nonce, pages)
        super().write(lease, nonce, pages)

    def clear(self, lease: int) -> None:
        """See `LeaseWords`."""
        super().clear(lease)
        self._table.clear(lease)


class SeenGrants(RankGrants):
    """The leases as another rank than 0 sees them."""

    def __init__(self, table: SharedLeases):
        super().__init__(table.leases)
        self._table = table

    def grant(self, lease: int) -> Grant | None:
        """See `Grants`."""
        word, known = self._table.word(lease), super().grant(lease)
        if known is not None and known.nonce == word:
            return known
        if word == 0:
            return None
        pages = self._table.pages(lease)
        if self._table.word(lease) != word:
            return None  # it ended in between
        self._grants[lease] = found = Grant(word, pages)
        return found

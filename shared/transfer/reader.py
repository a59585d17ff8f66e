"""Reads as a transfer posts them: what `fetches` drives, and each transport (`nixl`, `client`) implements.

Knows neither leases nor requests. That **only DONE proves that a read has ended** is a rule for the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from shared.primitives.cell import CELL_WORKERS_MAX
from shared.transfer.memory import WORD_BYTES
from shared.wire.baton import Baton

PEERS_MAX = CELL_WORKERS_MAX  # peers remembered at a time: all that a worker meets in its cell
SPANS_MAX = 4096  # of one read: a holder keeps 400 bytes of each while it answers


class ReadState(Enum):
    """The state of a posted read."""

    READING = "reading"
    DONE = "done"
    GONE = "gone"  # has ended, as DONE; bytes were left out, for the lease had ended
    WRONG = "wrong"  # has ended, as DONE; the peer's known page came with other bytes
    REFUSED = "refused"  # has ended, as DONE: another rank found that it could not be posted
    FAILED = "failed"  # no proof that nothing lands any more


ENDED = (ReadState.DONE, ReadState.GONE, ReadState.WRONG, ReadState.REFUSED)


class NotPostedError(Exception):
    """The read was refused before a single byte was asked for."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes to copy from one address of the holder to one address here."""

    source: int
    target: int
    size_bytes: int


class Reader(Protocol):
    """One generation of one-sided reads into one memory, closed as a whole: what a transport does."""

    def read_pages(self, baton: Baton, spans: Sequence[Span]) -> int:
        """Post a read of the holder's page memory and return its handle; `NotPostedError` when it never began.

        Of a holder of several ranks the baton names the one to read, see `rank_reader.at_rank`.

        A holder that sees the baton's lease ended may leave out bytes: the lease word will tell.
        """

    def read_word(self, baton: Baton, slot: int) -> int:
        """Post a read of the baton's lease word into a slot and return its handle; `NotPostedError` when it never
        began."""

    def word(self, slot: int) -> int:
        """The word that arrived in the slot."""

    def state(self, handle: int) -> ReadState:
        """The state of the read; asking also gives it time to progress."""

    def release(self, handle: int) -> None:
        """Forget a read that has `ENDED`; never called for another."""

    def new_transport(self) -> str:
        """The transport of the newest kind of connection, "cma/memory"; empty: no new kind since the last call."""

    def close(self) -> None:
        """Destroy the reader: when this returns nothing lands any more, whatever its reads were doing."""


def word_span(baton: Baton, target: int) -> Span:
    """The 8 bytes that prove the lease."""
    return Span(baton.holder.words_address + baton.lease * WORD_BYTES, target, WORD_BYTES)

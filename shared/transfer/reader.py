"""Reads as a transfer posts them: what `fetches` drives, and each transport (`nixl`, `client`) implements.

Knows neither leases nor requests. That **only DONE proves that a read has ended** is a rule for the caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from shared.primitives.cell import CELL_WORKERS_MAX
from shared.transfer.memory import WORD_BYTES, PageMemory
from shared.wire.baton import Baton

PEERS_MAX = CELL_WORKERS_MAX  # peers remembered at a time: all that a worker meets in its cell
SPANS_MAX = 4096  # of one read: a holder keeps 400 bytes of each while it answers


class ReadState(Enum):
    """The state of a posted read."""

    READING = "reading"
    DONE = "done"
    FAILED = "failed"  # no proof that nothing lands any more


class NotPostedError(Exception):
    """The read was refused before a single byte was asked for."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes to copy from one address of the holder to one address here."""

    source: int
    target: int
    size_bytes: int


class Reader(Protocol):
    """One generation of one-sided reads, closed as a whole."""

    def read_pages(self, baton: Baton, spans: Sequence[Span]) -> int:
        """Post a read of the holder's page memory and return its handle; `NotPostedError` when it never began.

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
        """Forget a read that is DONE; never called for another."""

    def new_transport(self) -> str:
        """The transport of the newest kind of connection, "cma/memory"; empty: no new kind since the last call."""

    def close(self) -> None:
        """Destroy the reader: when this returns nothing lands any more, whatever its reads were doing."""


def page_spans(baton: Baton, start_page: int, into: Sequence[int], pages: PageMemory) -> list[Span]:
    """What to copy; pages that are neighbours on both sides become one span."""
    size = pages.page_bytes
    spans: list[Span] = []
    for source_page, target_page in zip(baton.pages[start_page : start_page + len(into)], into, strict=True):
        source = baton.holder.pages_address + source_page * size
        target = pages.address + target_page * size
        last = spans[-1] if spans else None
        if last and (last.source + last.size_bytes, last.target + last.size_bytes) == (source, target):
            spans[-1] = Span(last.source, last.target, last.size_bytes + size)
        else:
            spans.append(Span(source, target, size))
    return spans


def word_span(baton: Baton, target: int) -> Span:
    """The 8 bytes that prove the lease."""
    return Span(baton.holder.words_address + baton.lease * WORD_BYTES, target, WORD_BYTES)


# ---- a reader's successor, made at once or on a thread while the loop goes on ----------------------------------------
# A NIXL reader registers the whole pool. For host memory that took 7 to 16 ms for 4 GiB over shared memory and TCP,
# which pin nothing. VRAM over RDMA is pinned page by page, and nobody has timed that here; on the loop's thread all
# streams of the worker would wait for it. Meanwhile fetches go to the old reader, as while no reader can be had.


Begin = Callable[[Callable[[], Reader]], "Future[Reader]"]


def make_here(make: Callable[[], Reader]) -> Future[Reader]:
    """Make it now: the result is there, or the `TransferError` is."""
    made: Future[Reader] = Future()
    _make(make, made)
    return made


def make_on_thread(pages: PageMemory, make: Callable[[], Reader]) -> Future[Reader]:
    """Make it on a thread of its own. `pages` are those that it registers."""
    made: Future[Reader] = Future()

    def make_with_device() -> Reader:
        pages.access.read(pages.address, pages.access.buffer(1))  # a thread's first copy gives it the device
        return make()

    threading.Thread(target=_make, args=(make_with_device, made), name="kv-new-reader", daemon=True).start()
    return made


def _make(make: Callable[[], Reader], made: Future[Reader]) -> None:
    try:
        made.set_result(make())
    except Exception as error:  # whatever it is, it is the loop's to see
        made.set_exception(error)

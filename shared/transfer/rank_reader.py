"""The reads of one rank of this worker from the ranks of any holder, and those of all its ranks together.

    WorkerReader ─┬─ RankReader of rank 0 ── Reader of a transport ──►  rank 0, 1 … of a holder, and its lease words
                  └─ PartReader of rank 1 ── …                          in this process, or told to another one

A `PartReader` is told what to read in pages and by its part (`slices`), not in bytes: a rank that lives in another
process computes its spans there. When a read of it has ended, its bytes lie where that rank computes, but for `settle`.
Knows neither leases nor how a transport reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import msgspec

from shared.transfer.memory import PageMemory
from shared.transfer.reader import ENDED, Reader, ReadState
from shared.transfer.slices import SlicePart
from shared.wire.baton import Baton

ReadHandle = tuple[int, int]  # the rank that reads, and what its reader calls the read


class PartReader(Protocol):
    """One generation of the reads of one rank. A handle is one of `ReadState`'s states at a time, as for a `Reader`."""

    def read_pages(
        self, baton: Baton, part: SlicePart, sources: Sequence[int], targets: Sequence[int]
    ) -> int:
        """Post a read of a part of the holder's pages `sources` into the own ones; `NotPostedError`: it never began."""

    def read_known_page(self, baton: Baton, part: SlicePart, target: int) -> int:
        """Post a read of the holder's known page, which ends as WRONG if the part of `target` has other bytes then."""

    def look(self) -> None:
        """Take over what has become of its reads; once a turn, before states are asked for."""

    def state(self, handle: int) -> ReadState:
        """The state of the read; asking also gives it time to progress."""

    def release(self, handle: int) -> None:
        """Forget a read that has ended; never called for another."""

    def settle(self) -> None:
        """Let whatever computes with this rank's pages see the bytes of its reads that have ended."""

    def begin_close(self) -> None:
        """Let the reader's end begin where another process brings it about; `close` follows."""

    def close(self) -> None:
        """Destroy the reader: when this returns nothing lands any more in this rank's pages."""


def at_rank(baton: Baton, rank: int) -> Baton:
    """The baton as if its holder were one rank of it, which has the lease's pages under the same numbers."""
    holder = baton.holder
    if not holder.ranks:
        return baton
    if rank == 0:
        return msgspec.structs.replace(baton, holder=msgspec.structs.replace(holder, ranks=()))
    of = holder.ranks[rank - 1]
    alone = msgspec.structs.replace(
        holder,
        agent=of.agent,
        metadata=of.metadata,
        pages_address=of.pages_address,
        device_id=of.device_id,
        memory=of.memory,
        words_address=0,  # rank 0 alone has words
        slices=of.slices,
        ranks=(),
    )
    return msgspec.structs.replace(baton, holder=alone)


class RankReader:
    """The reads of a rank in this process. Implements `PartReader`; of rank 0 it reads the lease words as well."""

    def __init__(self, reader: Reader, pages: PageMemory):
        self._reader = reader
        self._pages = pages
        self._checks: dict[int, tuple[int, range]] = {}  # by handle: the page, and its bytes to compare
        self._wrong: set[int] = set()

    def read_pages(
        self, baton: Baton, part: SlicePart, sources: Sequence[int], targets: Sequence[int]
    ) -> int:
        """See `PartReader`."""
        return self._reader.read_pages(at_rank(baton, part.source), part.spans(sources, targets))

    def read_known_page(self, baton: Baton, part: SlicePart, target: int) -> int:
        """See `PartReader`. What lies in the target proves nothing: it is zeroed first."""
        place = range(part.target_offset, part.target_offset + part.size_bytes)
        self._pages.clear(target, place)
        handle = self.read_pages(baton, part, [baton.holder.known_page], [target])
        self._checks[handle] = (target, place)
        return handle

    def read_word(self, baton: Baton, slot: int) -> int:
        """See `Reader`."""
        return self._reader.read_word(at_rank(baton, 0), slot)

    def word(self, slot: int) -> int:
        """See `Reader`."""
        return self._reader.word(slot)

    def look(self) -> None:
        """See `PartReader`. Its states are asked for one by one."""

    def state(self, handle: int) -> ReadState:
        """See `PartReader`. Compares a known page when its read has ended, before anything overwrites it.

        One that was left out has other bytes: no lease opens it, so no holder in order leaves it out.
        """
        state = self._reader.state(handle)
        if state in ENDED and (check := self._checks.pop(handle, None)):
            self.settle()
            if not self._pages.holds_known_bytes(*check):
                self._wrong.add(handle)
        return ReadState.WRONG if handle in self._wrong else state

    def release(self, handle: int) -> None:
        """See `PartReader`."""
        self._wrong.discard(handle)
        self._reader.release(handle)

    def new_transport(self) -> str:
        """See `Reader`."""
        return self._reader.new_transport()

    def settle(self) -> None:
        """See `PartReader`."""
        self._pages.access.settle()

    def begin_close(self) -> None:
        """See `PartReader`. It ends here."""

    def close(self) -> None:
        """See `PartReader`. A device that copies on its own outlives the transport's reader."""
        self._reader.close()
        self._pages.access.fence()


class WorkerReader:
    """One generation of the reads of all ranks of a worker: each rank reads its own parts, rank 0 the lease words."""

    def __init__(self, own: RankReader, others: Sequence[PartReader] = ()):
        self._own = own
        self._others = tuple(others)
        self._ranks: tuple[PartReader, ...] = (own, *others)

    def read_pages(
        self, baton: Baton, part: SlicePart, sources: Sequence[int], targets: Sequence[int]
    ) -> ReadHandle:
        """See `PartReader`; the part says which rank it is."""
        return part.rank, self._ranks[part.rank].read_pages(baton, part, sources, targets)

    def read_known_page(self, baton: Baton, part: SlicePart, target: int) -> ReadHandle:
        """See `PartReader`."""
        return part.rank, self._ranks[part.rank].read_known_page(baton, part, target)

    def read_word(self, baton: Baton, slot: int) -> ReadHandle:
        """See `Reader`."""
        return 0, self._own.read_word(baton, slot)

    def word(self, slot: int) -> int:
        """See `Reader`."""
        return self._own.word(slot)

    def look(self) -> None:
        """See `PartReader`. Those of rank 0 are looked at one by one."""
        for rank in self._others:
            rank.look()

    def state(self, handle: ReadHandle) -> ReadState:
        """See `PartReader`."""
        rank, own = handle
        return self._ranks[rank].state(own)

    def release(self, handle: ReadHandle) -> None:
        """See `PartReader`."""
        rank, own = handle
        self._ranks[rank].release(own)

    def new_transport(self) -> str:
        """See `Reader`. Ranks of one worker read by one transport."""
        return self._own.new_transport()

    def settle(self) -> None:
        """See `PartReader`."""
        for rank in self._ranks:
            rank.settle()

    def close(self) -> None:
        """See `PartReader`. All ranks do it at the same time: the worker's loop waits for the slowest, not for each."""
        for rank in self._others:
            rank.begin_close()
        for rank in self._ranks:
            rank.close()


# ---- a reader's successor, made at once or on a thread while the loop goes on ----------------------------------------
# A NIXL reader registers the whole pool. For host memory that took 7 to 16 ms for 4 GiB over shared memory and TCP,
# which pin nothing. VRAM over RDMA is pinned page by page, and nobody has timed that here; on the loop's thread all
# streams of the worker would wait for it. Meanwhile fetches go to the old reader, as while no reader can be had.


Begin = Callable[[Callable[[], WorkerReader]], "Future[WorkerReader]"]


def make_here(make: Callable[[], WorkerReader]) -> Future[WorkerReader]:
    """Make it now: the result is there, or the `TransferError` is."""
    made: Future[WorkerReader] = Future()
    _make(make, made)
    return made


def make_on_thread(pages: PageMemory, make: Callable[[], WorkerReader]) -> Future[WorkerReader]:
    """Make it on a thread of its own. `pages` are those that it registers."""
    made: Future[WorkerReader] = Future()

    def make_with_device() -> WorkerReader:
        pages.access.enter()
        return make()

    threading.Thread(target=_make, args=(make_with_device, made), name="kv-new-reader", daemon=True).start()
    return made


def _make(make: Callable[[], WorkerReader], made: Future[WorkerReader]) -> None:
    try:
        made.set_result(make())
    except Exception as error:  # whatever it is, it is the loop's to see
        made.set_exception(error)

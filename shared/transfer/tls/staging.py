"""Pages of a device on their way through host memory: the ring of one connection, a batch of portions in each slot.

A portion is what one frame carries and is small, so that it fits the processor's cache. To start a copy of the device
and to wait for it costs as much time as some portions take, whatever the size. So portions are copied in batches, the
device is waited for once a batch, and one batch is copied while another one is sealed and sent, or received and opened.

    holder   copy out 1 │ copy out 2       │ copy out 3       │
                        │ seal and send 1  │ seal and send 2  │ seal and send 3
    reader   receive 1  │ receive 2        │ receive 3        │
                        │ copy in 1        │ copy in 2        │ copy in 3 ── waited for ──► DONE

A slot is filled again only after what used it has ended. Memory is of `PageAccess.buffer`, pinned for a GPU:
`RING_BYTES` a connection, whatever is asked for. Knows no leases, no sockets and no keys. How large a batch should be
was not measured on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from itertools import cycle

from shared.transfer.memory import Copies, PageAccess
from shared.transfer.tls.channel import PORTION_BYTES
from shared.transfer.tls.protocol import Piece, cut_portions

BATCH_BYTES = 4 * PORTION_BYTES
SLOTS = 2  # batches in the ring
RING_BYTES = SLOTS * BATCH_BYTES


class StagingRing:
    """Host memory of one connection, for one read at a time. Belongs to the connection's thread."""

    def __init__(self, access: PageAccess):
        self._access = access
        memory = access.buffer(RING_BYTES)
        self._slots = [memory[begin : begin + BATCH_BYTES] for begin in range(0, RING_BYTES, BATCH_BYTES)]

    def read(self, spans: Sequence[tuple[int, int]]) -> Generator[memoryview]:
        """The bytes of the spans, each an address and a size, a portion at a time. To be closed: then no copy is under
        way. A portion is good until the next one is asked for."""
        begun: deque[tuple[Copies, list[memoryview]]] = deque()
        try:
            for slot, batch in self._batches(spans):
                copies = self._access.start_reads(_places(slot, batch, spans))
                begun.append((copies, _portions(slot, batch)))
                if len(begun) == SLOTS:
                    yield from _next_batch(begun)
            while begun:
                yield from _next_batch(begun)
        finally:
            for copies, _ in begun:
                copies.wait()

    def write(self, spans: Sequence[tuple[int, int]]) -> Generator[memoryview]:
        """Memory to put the bytes of the spans into, a portion at a time. A batch goes on its way when the portion
        behind it is asked for. No copy is under way at the end, nor when this is closed before: then the batch that is
        not whole is dropped."""
        begun: deque[Copies] = deque()
        try:
            for slot, batch in self._batches(spans):
                if len(begun) == SLOTS:
                    begun.popleft().wait()
                yield from _portions(slot, batch)
                begun.append(self._access.start_writes(_places(slot, batch, spans)))
        finally:
            for copies in begun:
                copies.wait()

    def _batches(self, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[memoryview, list[Piece]]]:
        """Each with its slot."""
        return zip(cycle(self._slots), cut_portions([size for _, size in spans], BATCH_BYTES), strict=False)


def _next_batch(begun: deque[tuple[Copies, list[memoryview]]]) -> Iterator[memoryview]:
    copies, portions = begun.popleft()
    copies.wait()
    yield from portions


def _portions(slot: memoryview, batch: list[Piece]) -> list[memoryview]:
    """The portions that `cut_portions` makes of the spans: every batch but the last one is a whole number of them."""
    size = sum(piece.size_bytes for piece in batch)
    return [slot[begin : min(begin + PORTION_BYTES, size)] for begin in range(0, size, PORTION_BYTES)]


def _places(
    slot: memoryview, batch: list[Piece], spans: Sequence[tuple[int, int]]
) -> list[tuple[int, memoryview]]:
    """The address of each piece, and where it lies in the slot."""
    places: list[tuple[int, memoryview]] = []
    begin = 0
    for piece in batch:
        address = spans[piece.span][0] + piece.begin
        places.append((address, slot[begin : begin + piece.size_bytes]))
        begin += piece.size_bytes
    return places

"""The two ends of what joins rank 0 and a follower: the ring of orders, and a pair of sockets beside it.

    down   the number of an order that lies in the ring now, 8 bytes
    up     reports: a buffer is free, a copy is done, of KV, a sentence before the end

Commands about KV are orders as well, so they come behind the steps before them. The memory has no name: it is inherited
by its descriptor, and holds the table of leases behind the ring. The end of a socket is the end of its process.

A socket holds a few hundred reports (278 by Linux' defaults), and rank 0 reads none while it waits for a step. As many
reads of KV and copies may be under way, so their reports wait for room; those of free buffers are as many as the ring
has, and find the rest of the socket empty. So a follower goes on with its steps whatever has come of all else.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum

import numpy as np

from shared.engine.parallel.orders import (
    COMMAND_BYTES_MAX,
    Order,
    OrderKind,
    OrderReader,
    OrderRing,
    OrderWriter,
    Words,
    capacity_for,
    command_words,
    words_for,
)
from shared.primitives.errors import RankError

_NUMBER = struct.Struct("=q")
_REPORT = struct.Struct("=qq")  # kind, number
_SENTENCE_BYTES = 4096
_KV_REPORT_BYTES = 96 << 10  # how a rank is reached: 64 KiB of metadata at most
_LOOK_SECONDS = (
    0.01  # between two looks for a free buffer: another thread may have read the report that told of one
)
_NOTHING = np.empty(0, dtype=np.int32)


class ReportKind(IntEnum):
    """What a follower tells rank 0."""

    FREE = 1  # of an order
    COPIED = 2  # of a copy, by its name
    REFUSED = 3  # it cannot start: a sentence
    FAILED = 4  # it ends by an error: a sentence
    PEER_LOST = 5  # it ends since a rank that it computes with has ended: a sentence
    KV = 6  # `shared.transfer.ranks.commands.Report`


def _ring(memory: int, capacity: int) -> OrderRing:
    return OrderRing(np.frombuffer(mmap.mmap(memory, 4 * words_for(capacity)), dtype=np.int32), capacity)


def _table_offset(capacity: int) -> int:
    """Where the memory behind the ring begins: at a page of it, as maps must."""
    return -(-4 * words_for(capacity) // mmap.PAGESIZE) * mmap.PAGESIZE


class LeaderEnd:
    """Rank 0's end to all followers. Implements `RankPort`, by which they are told of KV."""

    command_bytes_max = COMMAND_BYTES_MAX

    def __init__(self, sockets: Sequence[socket.socket], memory: int) -> None:
        """`sockets` of followers, rank 1 first; `memory`: the descriptor of the ring, of any size yet."""
        self.sockets = sockets
        self.sentences: dict[int, tuple[ReportKind, str]] = {}  # by follower, the last words
        self._memory = memory
        self._writer: OrderWriter | None = None
        self._copied: dict[int, int] = {}  # name → followers that are done
        self._kv_reports: list[list[bytes]] = [[] for _ in sockets]
        self._reading = threading.Lock()  # the watcher reads what is left when a follower has ended
        self._telling = threading.Lock()  # a reader of KV may be asked for on a thread of its own

    def open(self, capacity: int) -> None:
        """Make the ring, for orders of so many words."""
        self._capacity = capacity_for(capacity)
        os.ftruncate(self._memory, 4 * words_for(self._capacity))
        self._writer = OrderWriter(_ring(self._memory, self._capacity), len(self.sockets))

    def share_memory(self, size_bytes: int) -> tuple[int, memoryview]:
        """Zeroed memory that all ranks can map, once: its offset, by which they do, and the memory itself."""
        offset = _table_offset(self._capacity)
        os.ftruncate(self._memory, offset + size_bytes)
        return offset, memoryview(mmap.mmap(self._memory, size_bytes, offset=offset))

    def step(self, operations: Words, words: Words) -> None:
        """Tell a step; waits while a follower is a whole ring behind."""
        self._tell(OrderKind.STEP, operations, words)

    def copy(self, name: int, pages: Sequence[int], host_pages: Sequence[int], *, backup: bool) -> None:
        """Tell a copy between pages of the device and of the host."""
        kind = OrderKind.BACKUP if backup else OrderKind.RESTORE
        self._copied[name] = 0
        self._tell(kind, _NOTHING, np.array([*pages, *host_pages], dtype=np.int32), name)

    def copied(self, name: int) -> bool:
        """Whether all followers are done with a copy; it is forgotten then."""
        self._read_all()
        if self._copied[name] < len(self.sockets):
            return False
        del self._copied[name]
        return True

    def tell(self, rank: int, command: bytes) -> None:
        """See `RankPort`. Waits while a follower is a whole ring behind."""
        self._tell(OrderKind.KV, *command_words(command), rank)

    def reports(self, rank: int) -> list[bytes]:
        """See `RankPort`."""
        if not self.read(rank - 1):
            raise RankError(f"rank {rank} has ended")
        with self._reading:
            found, self._kv_reports[rank - 1] = self._kv_reports[rank - 1], []
        return found

    def wait(self, rank: int, seconds: float) -> None:
        """See `RankPort`."""
        select.select([self.sockets[rank - 1]], [], [], seconds)

    def end(self) -> None:
        """Tell the end, and nothing more. Waits for nobody: who has ended or is a ring behind sees the socket's end."""
        with suppress(RankError):
            if self._writer is not None and self._has_free():
                self._tell(OrderKind.END, _NOTHING, _NOTHING)
        for each in self.sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_WR)

    def _tell(self, kind: OrderKind, operations: Words, words: Words, name: int = 0) -> None:
        assert self._writer is not None, "the ring is not open yet"
        with self._telling:
            while not self._has_free():
                select.select(self.sockets, [], [], _LOOK_SECONDS)
            number = _NUMBER.pack(self._writer.write(kind, operations, words, name))
            for rank, each in enumerate(self.sockets, 1):
                try:
                    each.send(number)
                except OSError as error:
                    raise RankError(f"rank {rank} has ended") from error

    def _has_free(self) -> bool:
        """Whether a buffer can be written now; reports are read when buffers run short."""
        assert self._writer is not None
        if self._writer.free <= 1:
            self._read_all()
        return self._writer.free > 0

    def _read_all(self) -> None:
        for follower in range(len(self.sockets)):
            if not self.read(follower):
                raise RankError(f"rank {follower + 1} has ended")

    def read(self, follower: int) -> bool:
        """Take over what a follower has told; whether it lives."""
        with self._reading:
            while True:
                try:
                    report = self.sockets[follower].recv(_REPORT.size + _KV_REPORT_BYTES, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return True
                except OSError:
                    return False
                if not report:
                    return False
                self._take_over(follower, report)

    def _take_over(self, follower: int, report: bytes) -> None:
        kind, number = _REPORT.unpack_from(report)
        match ReportKind(kind):
            case ReportKind.FREE:
                assert self._writer is not None
                self._writer.give_back(follower, number)
            case ReportKind.COPIED:
                self._copied[number] += 1
            case ReportKind.KV:
                self._kv_reports[follower].append(report[_REPORT.size :])
            case last:
                self.sentences[follower] = last, report[_REPORT.size :].decode(errors="replace")


class FollowerEnd:
    """A follower's end. Orders are taken by one thread; any may report."""

    def __init__(self, own: socket.socket, memory: int) -> None:
        self._socket = own
        self._memory = memory
        self._reader: OrderReader | None = None

    @property
    def is_alone(self) -> bool:
        """Whether rank 0 has ended."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return bool(poll.poll(0))

    def open(self, capacity: int) -> None:
        """Say how many words an order has at most; the ring is mapped when the first one comes."""
        self._capacity = capacity_for(capacity)

    def map_shared(self, offset: int, size_bytes: int) -> memoryview:
        """The memory that `LeaderEnd.share_memory` has given."""
        return memoryview(mmap.mmap(self._memory, size_bytes, offset=offset))

    def take(self) -> Order | None:
        """Wait for the next order; None: rank 0 has ended."""
        try:
            told = self._socket.recv(_NUMBER.size)
        except ConnectionResetError:  # it has left reports unread
            return None
        if not told:
            return None
        if self._reader is None:
            self._reader = OrderReader(_ring(self._memory, self._capacity))
        (number,) = _NUMBER.unpack(told)
        return self._reader.take(number)

    def give_back(self) -> None:
        """Done with the buffer of the order that was taken last."""
        assert self._reader is not None
        self._report(ReportKind.FREE, self._reader.give_back())

    def copied(self, name: int) -> None:
        """A copy is done. Not from the thread that takes orders."""
        self._report_with_room(ReportKind.COPIED, name)

    def tell_kv(self, report: bytes) -> None:
        """Report about KV. Not from the thread that takes orders."""
        self._report_with_room(ReportKind.KV, 0, report)

    def say(self, kind: ReportKind, sentence: str) -> None:
        """Say why this rank ends, as far as it is heard."""
        try:
            self._report(kind, 0, sentence.encode()[:_SENTENCE_BYTES])
        except OSError:
            return

    def _report_with_room(self, kind: ReportKind, number: int, sentence: bytes = b"") -> None:
        """Wait while more than a quarter of the socket is unread: then Linux says that it cannot be written."""
        select.select([], [self._socket], [])
        self._report(kind, number, sentence)

    def _report(self, kind: ReportKind, number: int, sentence: bytes = b"") -> None:
        self._socket.send(_REPORT.pack(kind, number) + sentence)

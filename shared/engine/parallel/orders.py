"""What rank 0 of a worker tells its followers: the words of a step, in a ring that all map.

All that a step tells a device lies in one buffer of int32 words (`cuda.staging`), and so it is told to other ranks as
well: an order is these words, and operations that say what is done with them. Nothing is pickled, and no request is
named: a follower knows neither scheduler nor sampling.

    rank 0      write 1 │ write 2 │ write 3 …           order n lies in buffer n modulo the number of buffers
    follower          take 1 │ give back 1 │ take 2 …   in order, none left out; a buffer is written again once all
                                                        followers have given it back

Whoever writes or gives back tells it to the other by a system call (`shared.worker.rank_channel`), which is the barrier
between memories. This file is the ring alone: no memory is mapped here, and nothing waits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.primitives.errors import InvariantError

Words = NDArray[np.int32]

BUFFERS = 8
COMMAND_BYTES_MAX = 128 << 10  # about KV: pages of a read, and a holder with 64 KiB of metadata
_HEADER = struct.Struct("=5q")  # number, kind, name, words of operations, words of staging
_HEADER_WORDS = _HEADER.size // 4


class OrderKind(IntEnum):
    """What an order is about."""

    STEP = 1  # words of staging, and operations on them
    BACKUP = 2  # pages, then as many host pages
    RESTORE = 3  # the same pages, the other way
    END = 4
    KV = 5  # a command about KV in the words, of so many bytes: `shared.transfer.ranks.commands`; its name is the rank


class Operation(IntEnum):
    """What is done with the words of a step, on all ranks in this order; its numbers follow."""

    WRITE = 1  # where pairs (place, word) begin, and how many: written to the state of slots
    DECODE = 2  # rows of a bucket, then for each the tokens in its last page
    EXTEND = (
        3  # where arrays begin, requests, pages, tokens, tokens with logits, the first row of these or -1
    )
    EXTEND_GRAPH = (
        4  # tokens of a bucket, where its array begins, and its words, tokens with logits, their first row
    )
    TAKE_TOKENS = 5  # where slots begin, and how many: what rank 0 chose is their last token


@dataclass(frozen=True, slots=True)
class Order:
    """One order as it lies in the ring: its arrays are views until it is given back."""

    number: int
    kind: OrderKind
    name: int  # by which a copy is reported
    operations: Words
    words: Words


def operation(kind: Operation, *numbers: int | NDArray[np.signedinteger]) -> Words:
    """An operation in words: its kind, how many numbers follow, and these."""
    parts = [np.atleast_1d(np.asarray(each, dtype=np.int32)) for each in numbers]
    count = sum(len(part) for part in parts)
    return np.concatenate([np.array([kind, count], dtype=np.int32), *parts])


def operations_of(words: Words) -> Iterator[tuple[Operation, Words]]:
    """The operations of an order, with their numbers."""
    at = 0
    while at < len(words):
        kind, count = Operation(int(words[at])), int(words[at + 1])
        end = at + 2 + count
        if count < 0 or end > len(words):
            raise InvariantError(f"{kind.name} has {count} numbers, {len(words) - at - 2} words are left")
        yield kind, words[at + 2 : end]
        at = end


class Orders(Protocol):
    """What other ranks are told to do as well; see `shared.worker.rank_channel.LeaderEnd`."""

    def open(self, capacity: int) -> None:
        """From now on orders come, of so many words at most."""

    def step(self, operations: Words, words: Words) -> None:
        """The words of a buffer, and what is done with them."""

    def copy(self, name: int, pages: Sequence[int], host_pages: Sequence[int], *, backup: bool) -> None:
        """A copy between pages of the device and of the host."""

    def copied(self, name: int) -> bool:
        """Whether all are done with a copy; asked until it is so."""


class OrderRing:
    """The memory of the ring: as many buffers as there are, each for so many words."""

    def __init__(self, memory: Words, capacity: int, buffers: int = BUFFERS) -> None:
        """`memory` int32 [`words_for`(capacity, buffers)]; `capacity`: words of operations and staging together."""
        assert len(memory) == words_for(capacity, buffers)
        self.capacity, self.buffers = capacity, buffers
        self._memory = memory.reshape(buffers, -1)

    def put(self, order: Order) -> None:
        """Write an order to its buffer."""
        operations, words = len(order.operations), len(order.words)
        if operations + words > self.capacity:
            raise InvariantError(f"an order has {operations + words} words, a buffer holds {self.capacity}")
        buffer = self._memory[order.number % self.buffers]
        header = _HEADER.pack(order.number, order.kind, order.name, operations, words)
        buffer[:_HEADER_WORDS] = np.frombuffer(header, dtype=np.int32)
        end = _HEADER_WORDS + operations
        buffer[_HEADER_WORDS:end] = order.operations
        buffer[end : end + words] = order.words

    def get(self, number: int) -> Order:
        """The order of this number. Raises `InvariantError` if another one lies there."""
        buffer = self._memory[number % self.buffers]
        found, kind, name, operations, words = _HEADER.unpack(buffer[:_HEADER_WORDS].tobytes())
        if found != number:
            raise InvariantError(f"order {number} is told, order {found} lies in its buffer")
        if min(operations, words) < 0 or operations + words > self.capacity:
            raise InvariantError(
                f"order {number} has {operations} and {words} words, a buffer holds {self.capacity}"
            )
        end = _HEADER_WORDS + operations
        return Order(number, OrderKind(kind), name, buffer[_HEADER_WORDS:end], buffer[end : end + words])


def words_for(capacity: int, buffers: int = BUFFERS) -> int:
    """Words of memory for a ring whose buffers hold so many each."""
    return buffers * (_HEADER_WORDS + capacity)


def capacity_for(words: int) -> int:
    """Words that a buffer must hold where a step has so many at most: commands about KV lie there as well."""
    return max(words, 1 + -(-COMMAND_BYTES_MAX // 4))


def command_words(command: bytes) -> tuple[Words, Words]:
    """A command about KV as operations and words of an order."""
    padded = command + bytes(-len(command) % 4)
    return np.array([len(command)], dtype=np.int32), np.frombuffer(padded, dtype=np.int32)


def command_of(order: Order) -> bytes:
    """The command of an order, copied out of the ring."""
    (size,) = order.operations
    return order.words.tobytes()[: int(size)]


class OrderWriter:
    """Rank 0's side of a ring."""

    def __init__(self, ring: OrderRing, followers: int) -> None:
        self._ring = ring
        self._written = 0
        self._given_back = [0] * followers

    @property
    def free(self) -> int:
        """Buffers that can be written now."""
        return self._ring.buffers - (self._written - min(self._given_back))

    def write(self, kind: OrderKind, operations: Words, words: Words, name: int = 0) -> int:
        """Write the next order; returns its number. `InvariantError` if a follower still reads its buffer."""
        if not self.free:
            raise InvariantError(f"order {self._written + 1} would overwrite one that a follower still reads")
        self._ring.put(Order(self._written + 1, kind, name, operations, words))
        self._written += 1
        return self._written

    def give_back(self, follower: int, number: int) -> None:
        """A follower has done with the buffer of this order; orders are given back as they were written."""
        if number != self._given_back[follower] + 1 or number > self._written:
            raise InvariantError(
                f"follower {follower} gives back order {number}, expected {self._given_back[follower] + 1} of "
                f"{self._written}"
            )
        self._given_back[follower] = number


class OrderReader:
    """A follower's side of a ring."""

    def __init__(self, ring: OrderRing) -> None:
        self._ring = ring
        self._taken = 0
        self._held = False

    def take(self, number: int) -> Order:
        """The order that is told. `InvariantError` unless it is the next one, and the one before was given back."""
        if self._held or number != self._taken + 1:
            raise InvariantError(f"order {number} is told after {self._taken}, held: {self._held}")
        order = self._ring.get(number)
        self._taken, self._held = number, True
        return order

    def give_back(self) -> int:
        """Done with what was taken last; returns its number, for rank 0."""
        assert self._held
        self._held = False
        return self._taken

"""Staging buffers: what the host tells the device about a step, in one copy.

The host fills a buffer while the device may still read those of the steps before, so there is a ring of them, and each
is filled again only after the mark behind the step that read it. On the device there is one buffer: steps follow each
other there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.parallel.orders import Operation, Orders, operation
from shared.engine.streams import Mark, Stream
from shared.primitives.errors import InvariantError

_OPERATION_WORDS = 256  # of an order, beside a number for each row of DECODE
BUFFERS = 4  # of what one step after the other fills once


def place_of(words: Tensor) -> int:
    """Where a part of an array begins, in words of the array."""
    return int(words.storage_offset())


class Staging:
    """A ring of int32 buffers on the host, and their copy on the device.

    The first `fixed` words lie at the same place in every step, for graphs; the others are handed out by `put`.
    """

    def __init__(self, stream: Stream, device: Tensor, fixed: int, buffers: int = BUFFERS) -> None:
        """`device`: int32 [capacity]; `buffers` in the ring."""
        self.device = device
        self._stream = stream
        self._fixed = fixed
        self._ring = [stream.buffer(len(device)) for _ in range(buffers)]
        self._views: list[NDArray[np.int32]] = [buffer.numpy() for buffer in self._ring]
        self._fixed_parts = [(device[:fixed], buffer[:fixed]) for buffer in self._ring]
        self._read: list[Mark | None] = [None] * buffers
        self._current = 0
        self._used = fixed
        self._orders: Orders | None = None
        self._noted: list[NDArray[np.int32]] = []  # what is done with this buffer

    @property
    def free(self) -> int:
        """Words that `put` can still take."""
        return len(self.device) - self._used

    def tell(self, orders: Orders) -> None:
        """From now on other ranks are told what is uploaded, and what is done with it."""
        self._orders = orders

    def note(self, kind: Operation, *numbers: int | Tensor | NDArray[np.signedinteger]) -> None:
        """Other ranks do this with the buffer; a tensor of the device stands for the place where it begins."""
        if self._orders is not None:
            places = (place_of(each) if isinstance(each, Tensor) else each for each in numbers)
            self._noted.append(operation(kind, *places))

    @property
    def order_words(self) -> int:
        """Words of the longest order: a buffer, and what is done with it."""
        return len(self.device) + self._fixed + _OPERATION_WORDS

    def begin(self) -> None:
        """Take the next buffer, as soon as the step that read it is over."""
        self._current = (self._current + 1) % len(self._ring)
        if (read := self._read[self._current]) is not None:
            read.wait()
        self._used = self._fixed

    def fill(self, words: NDArray[np.int32]) -> None:
        """Overwrite the whole buffer with one of another rank."""
        self._views[self._current][: len(words)] = words
        self._used = len(words)

    def at(self, place: int, count: int) -> tuple[Tensor, Tensor]:
        """Words that the buffer holds: on the host, and where the device will find them."""
        end = place + count
        if min(place, count) < 0 or end > self._used:
            raise InvariantError(f"words {place} to {end} are asked for, the buffer holds {self._used}")
        return self._ring[self._current][place:end], self.device[place:end]

    def put(self, words: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        """Add words, in the order in which they lie. Returns them on the host, and where the device will find them."""
        start, end = self._used, self._used + words.size
        if end > len(self.device):
            raise InvariantError(f"a step needs {end} words of staging, there are {len(self.device)}")
        self._views[self._current][start:end] = words.reshape(-1)
        self._used = end
        shape = words.shape
        return self._ring[self._current][start:end].view(shape), self.device[start:end].view(shape)

    def fixed(self, place: int, count: int) -> NDArray[np.int32]:
        """Words of the fixed part, to be read and written."""
        end = place + count
        assert end <= self._fixed
        return self._views[self._current][place:end]

    def upload(self) -> None:
        """Copy to the device what the buffer holds. Other ranks are told."""
        if self._noted and self._orders is not None:
            self._orders.step(np.concatenate(self._noted), self._views[self._current][: self._used])
            self._noted = []
        if self._used == self._fixed:
            self._stream.upload(*self._fixed_parts[self._current])
        else:
            self._stream.upload(self.device[: self._used], self._ring[self._current][: self._used])

    def end(self, read: Mark) -> None:
        """The mark behind all that reads this buffer on the host."""
        self._read[self._current] = read

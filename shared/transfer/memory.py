"""The memory that a transfer offers to peers: the KV pages, and the table of lease words.

Addresses and bytes only. What the pages mean, who holds a lease and when it ends is not known here; nor is how
bytes travel. Pages may lie where this process cannot address them (VRAM): `PageAccess` is how it reads and writes
them then. Lease words are always in host memory.

A word must never be seen half written. It is 8 bytes at a multiple of 8, written by one store, and every transport
in use copies an aligned 8-byte span by one load; the table starts on a memory page of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

WORD_BYTES = 8
RANKS_MAX = 16  # of a worker that is read: GPUs of a node
KNOWN_BYTES = bytes(range(1, 252))  # repeated; their number is prime, so a shifted page does not look right


class PageAccess(Protocol):
    """How this process reads and writes its own KV pages. All but `settle` and `fence` may be called from any thread.

    Addresses are those of the page memory, in bytes. `read` and `write` have ended when they return.
    """

    def view(self, address: int, size_bytes: int) -> memoryview | None:
        """The bytes themselves, where this process can address them; None: they must be copied."""

    def buffer(self, size_bytes: int) -> memoryview:
        """Fresh memory of this process that `read` and `write` are quick with."""

    def read(self, address: int, into: memoryview) -> None:
        """Copy `len(into)` bytes from the address on."""

    def write(self, address: int, content: bytes | memoryview) -> None:
        """Copy the bytes to the address."""

    def enter(self) -> None:
        """Give the calling thread the device that has the pages, for whatever else it does with them."""

    def settle(self) -> None:
        """Let whatever computes with the pages see the bytes of every read that is DONE."""

    def fence(self) -> None:
        """Return when nothing lands any more of what closed readers had begun: a device may copy on its own."""


class HostAccess:
    """To pages in host memory. Implements `PageAccess`; whoever owns the memory must keep it."""

    def view(self, address: int, size_bytes: int) -> memoryview | None:
        """See `PageAccess`."""
        return view_of(address, size_bytes)

    def buffer(self, size_bytes: int) -> memoryview:
        """See `PageAccess`."""
        return memoryview(bytearray(size_bytes))

    def read(self, address: int, into: memoryview) -> None:
        """See `PageAccess`."""
        into[:] = view_of(address, len(into))

    def write(self, address: int, content: bytes | memoryview) -> None:
        """See `PageAccess`."""
        view_of(address, len(content))[:] = content

    def enter(self) -> None:
        """See `PageAccess`. It has them."""

    def settle(self) -> None:
        """See `PageAccess`. Whoever reported DONE has made them visible."""

    def fence(self) -> None:
        """See `PageAccess`. A closed reader has ended its reads."""


HOST_ACCESS = HostAccess()


@dataclass(frozen=True, slots=True)
class PageSlices:
    """Which slices of each page lie in a memory, of how many (see `slices`); none of none: pages are not cut."""

    first: int = 0
    count: int = 0
    total: int = 0

    @property
    def peer_ranks_max(self) -> int:
        """How many ranks of one peer read these slices at most, and are read for them."""
        return max(1, -(-RANKS_MAX * self.count // max(1, self.total)))


WHOLE_PAGES = PageSlices()


@dataclass(frozen=True, slots=True)
class PageMemory:
    """One span of memory with all KV pages of a rank; page i begins at `address + i * page_bytes`.

    Behind those of the pool there may be one more, the known page, by which peers check their reads (`kv_links`). All
    ranks of a worker have their slices of one pattern there, so that any cut of a peer's compares with any other.
    """

    address: int
    page_bytes: int
    pages: int  # of the pool
    device_id: int = 0
    memory: str = "DRAM"  # DRAM or VRAM
    known_pages: int = 0  # 0 or 1
    access: PageAccess = HOST_ACCESS
    slices: PageSlices = WHOLE_PAGES

    @property
    def size_bytes(self) -> int:
        return (self.pages + self.known_pages) * self.page_bytes

    @property
    def known_page(self) -> int:
        """The page that holds the same bytes in every worker, or its slices of them; -1: there is none."""
        return self.pages if self.known_pages else -1

    def address_of(self, page: int) -> int:
        """Where the page begins, in bytes."""
        return self.address + page * self.page_bytes

    def write_known_bytes(self, page: int) -> None:
        """Make it a known page."""
        self.access.write(self.address_of(page), self._known_bytes(range(self.page_bytes)))

    def clear(self, page: int, part: range | None = None) -> None:
        """Zero the page, or a part of its bytes."""
        part = part or range(self.page_bytes)
        self.access.write(self.address_of(page) + part.start, bytes(len(part)))

    def holds_known_bytes(self, page: int, part: range | None = None) -> bool:
        """Whether the page, or a part of its bytes, is that of a known page."""
        part = part or range(self.page_bytes)
        content = self.access.buffer(len(part))
        self.access.read(self.address_of(page) + part.start, content)
        return content == self._known_bytes(part)

    def _known_bytes(self, part: range) -> bytes:
        first = self.slices.first * (self.page_bytes // max(1, self.slices.count))
        begin = (first + part.start) % len(KNOWN_BYTES)
        return (KNOWN_BYTES * (len(part) // len(KNOWN_BYTES) + 2))[begin : begin + len(part)]


def view_of(address: int, size_bytes: int) -> memoryview:
    """The memory there as bytes that can be read and written; whoever owns it must keep it."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def new_nonce() -> int:
    """A number of 64 bits that nobody can guess; never 0, which is the word of no lease."""
    return secrets.randbits(8 * WORD_BYTES) or new_nonce()


class WordTable:
    """8-byte words in host memory of this process; implements `LeaseWords`.

    Whoever may read this memory may read the pages as well, so nothing binds a word to its pages: see `grants` for the
    transport that can.
    """

    def __init__(self, words: int):
        self._words = words
        self._map = mmap.mmap(-1, words * WORD_BYTES)  # begins on a page boundary, zeroed
        self._view = memoryview(self._map).cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.size_bytes = words * WORD_BYTES

    def __len__(self) -> int:
        return self._words

    def open(self, lease: int, pages: Sequence[int]) -> int:
        """See `LeaseWords`."""
        nonce = new_nonce()
        self.write(lease, nonce, pages)
        return nonce

    def write(self, lease: int, nonce: int, pages: Sequence[int] = ()) -> None:
        """Set the word. A word in use is cleared first: two leases never share one."""
        del pages
        assert nonce != 0, "0 is the word of no lease"
        assert self._view[lease] == 0, f"lease word {lease} is in use"
        self._view[lease] = nonce

    def clear(self, lease: int) -> None:
        """Zero the word: every baton of this lease is stale from now on."""
        self._view[lease] = 0

    def read(self, lease: int) -> int:
        """The word as it is now."""
        return self._view[lease]

    def address_of(self, lease: int) -> int:
        """Where the word lies, in bytes."""
        return self.address + lease * WORD_BYTES

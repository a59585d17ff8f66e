"""The memory that a transfer offers to peers: the KV pages, and the table of lease words.

Addresses and bytes only. What the pages mean, who holds a lease and when it ends is not known here; nor is how
bytes travel.

A word must never be seen half written. It is 8 bytes at a multiple of 8, written by one store, and every transport
in use copies an aligned 8-byte span by one load; the table starts on a memory page of its own.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

WORD_BYTES = 8
KNOWN_BYTES = bytes(range(1, 252))  # repeated; their number is prime, so a shifted page does not look right


@dataclass(frozen=True, slots=True)
class PageMemory:
    """One span of memory with all KV pages of a worker; page i begins at `address + i * page_bytes`.

    Behind those of the pool there may be one more, the known page, by which peers check their reads (`kv_links`).
    """

    address: int
    page_bytes: int
    pages: int  # of the pool
    device_id: int = 0
    memory: str = "DRAM"  # DRAM or VRAM
    known_pages: int = 0  # 0 or 1

    @property
    def size_bytes(self) -> int:
        return (self.pages + self.known_pages) * self.page_bytes

    @property
    def known_page(self) -> int:
        """The page that holds the same bytes in every worker; -1: there is none."""
        return self.pages if self.known_pages else -1

    def address_of(self, page: int) -> int:
        """Where the page begins, in bytes."""
        return self.address + page * self.page_bytes

    def write_known_bytes(self, page: int) -> None:
        """Make it a known page. Only for DRAM, as the next two."""
        ctypes.memmove(self.address_of(page), self._known_bytes(), self.page_bytes)

    def clear(self, page: int) -> None:
        """Zero the page."""
        ctypes.memset(self.address_of(page), 0, self.page_bytes)

    def holds_known_bytes(self, page: int) -> bool:
        """Whether the page has the bytes of a known page."""
        return ctypes.string_at(self.address_of(page), self.page_bytes) == self._known_bytes()

    def _known_bytes(self) -> bytes:
        return (KNOWN_BYTES * (self.page_bytes // len(KNOWN_BYTES) + 1))[: self.page_bytes]


def view_of(address: int, size_bytes: int) -> memoryview:
    """The memory there as bytes that can be read and written; whoever owns it must keep it."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


class WordTable:
    """8-byte words in host memory of this process; implements `LeaseWords`."""

    def __init__(self, words: int):
        self._words = words
        self._map = mmap.mmap(-1, words * WORD_BYTES)  # begins on a page boundary, zeroed
        self._view = memoryview(self._map).cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.size_bytes = words * WORD_BYTES

    def __len__(self) -> int:
        return self._words

    def write(self, lease: int, nonce: int) -> None:
        """Set the word. A word in use is cleared first: two leases never share one."""
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

"""The check before a worker is ready: one page fetched from itself, all the way that a peer's fetch takes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Protocol

from shared.baton import Baton
from shared.errors import TransferError
from shared.transfer.memory import PageMemory
from shared.transfer.protocol import Collected, Fetcher, FetchEvent, Landed, LeaseWords

FETCH_ID = 0
PATTERN = bytes(range(1, 252))  # a prime length: a shifted page does not look right
WAIT_SECONDS = 0.001


class _Transfer(Fetcher, Protocol):
    @property
    def words(self) -> LeaseWords: ...


def self_fetch(
    transfer: _Transfer,
    pages: PageMemory,
    kv_format: str,
    *,
    seconds_max: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Fetch the first page into the last one, and hear of it as the holder. Returns bytes per second.

    Call it before anything else uses the pages and the words. `TransferError` in one sentence when the page does
    not land, lands with other bytes (checked in DRAM only: VRAM is not this process's to look into), or no
    notification comes.
    """
    source, target = 0, pages.pages - 1
    assert source != target, "the self-fetch needs two pages"
    if pages.memory == "DRAM":
        _fill(pages, source)
    nonce = transfer.holder.epoch | 1
    baton = Baton("self-fetch", 0, transfer.holder, kv_format, 0, nonce, 1, 1, (source,))
    transfer.words.write(0, nonce)
    transfer.start(FETCH_ID, baton, 0, [target])
    landed, collected = _wait(transfer, clock() + seconds_max, clock)
    transfer.words.clear(0)
    if not isinstance(landed, Landed):
        raise TransferError(
            f"the self-fetch of a KV page ended with {landed!r}: is UCX allowed to listen here?"
        )
    if not collected:
        raise TransferError(f"the self-fetch of a KV page was not notified within {seconds_max} s")
    if pages.memory == "DRAM" and _page(pages, source) != _page(pages, target):
        raise TransferError("the self-fetch of a KV page brought other bytes than the page has")
    return landed.fetched_bytes / landed.seconds


def _wait(transfer: Fetcher, deadline: float, clock: Callable[[], float]) -> tuple[FetchEvent | None, bool]:
    ended: FetchEvent | None = None
    collected = False
    while clock() < deadline and not (isinstance(ended, Landed) and collected):
        for event in transfer.poll():
            if isinstance(event, Collected):
                collected = True
            else:
                ended = event
        if ended is not None and not isinstance(ended, Landed):
            break
        time.sleep(WAIT_SECONDS)
    return ended, collected


def _fill(pages: PageMemory, page: int) -> None:
    repeated = PATTERN * (pages.page_bytes // len(PATTERN) + 1)
    ctypes.memmove(pages.address + page * pages.page_bytes, repeated, pages.page_bytes)


def _page(pages: PageMemory, page: int) -> bytes:
    return ctypes.string_at(pages.address + page * pages.page_bytes, pages.page_bytes)

"""The check before a worker is ready: it fetches one page from itself, by the same steps as from a peer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from shared.primitives.errors import TransferError
from shared.transfer.memory import PageMemory
from shared.transfer.protocol import Fetcher, FetchEvent, FetchLanded, LeaseWords
from shared.wire.baton import Baton

FETCH_ID = 0
TARGET = 0  # any page of the pool: none is in use yet
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
) -> str:
    """Fetch the known page into one of the pool. Returns the transport that carried it.

    Call it before anything else uses the pages and the words. `TransferError` in one sentence when the page does
    not land, or lands with other bytes: that is compared by every first fetch from a worker, see `fetches`.
    """
    nonce = transfer.words.open(0, (pages.known_page,))
    baton = Baton("self-fetch", 0, transfer.holder, kv_format, 0, nonce, 1, 1, (pages.known_page,))
    transfer.start(FETCH_ID, baton, 0, [TARGET])
    landed = _wait(transfer, clock() + seconds_max, clock)
    transfer.words.clear(0)
    if not isinstance(landed, FetchLanded) or landed.link is None:
        raise TransferError(
            f"the self-fetch of a KV page ended with {landed!r}: can the KV ports be used here?"
        )
    return landed.link.transport


def _wait(transfer: Fetcher, deadline: float, clock: Callable[[], float]) -> FetchEvent | None:
    while clock() < deadline:
        if events := transfer.poll():
            return events[-1]
        time.sleep(WAIT_SECONDS)
    return None

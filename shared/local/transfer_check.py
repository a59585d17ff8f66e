"""Whether this machine can move KV pages: a process fetches some from itself over NIXL, as every worker does.

    python -m shared.local.transfer_check

A process of its own, because a library that does not fit the machine may end the process that loads it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time

from shared.links.keys import new_key_files, open_in_memory, read_keys
from shared.primitives.errors import StartError, TransferError
from shared.transfer.fetches import FetchLimits
from shared.transfer.memory import PageMemory
from shared.transfer.protocol import FetchLanded
from shared.transfer.transfer import Transfer, self_fetch
from shared.transfer.transports import KvNetwork, open_offer
from shared.transfer.ucx import LOOPBACK
from shared.wire.baton import Baton

PAGE_BYTES = 1 << 20
PAGES = 64  # half of them are read into the other half
KV_FORMAT = "bytes"
EPOCH = 3
SECONDS_MAX = 10.0


def fetch_from_itself() -> str:
    """What carried the pages, and how fast. Raises StartError, one sentence."""
    memory = mmap.mmap(-1, (PAGES + 1) * PAGE_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pages = PageMemory(address, PAGE_BYTES, PAGES, known_pages=1)
    pages.write_known_bytes(pages.known_page)
    keys = read_keys(f"/dev/fd/{open_in_memory(new_key_files()['worker'])}", "worker")
    network = KvNetwork("nixl", LOOPBACK, "20000-20999")
    offer = open_offer(network, keys, ("transfer-check", EPOCH), pages, 2)
    limits = FetchLimits(fetches_max=2, fetch_seconds_max=SECONDS_MAX, quarantine_seconds=1.0)
    transfer = Transfer(offer, pages, KV_FORMAT, limits=limits, clock=time.monotonic)
    try:
        transport = self_fetch(transfer, pages, KV_FORMAT)
        return f"{transport}, {_measured(transfer) / 1e9:.1f} GB/s"
    finally:
        transfer.close()


def _measured(transfer: Transfer) -> float:
    """Bytes per second of a fetch of half the pages into the other half."""
    half = PAGES // 2
    nonce = transfer.words.open(1, range(half))
    baton = Baton("transfer-check", 0, transfer.holder, KV_FORMAT, 1, nonce, 1, 1, tuple(range(half)))
    began_at = time.monotonic()
    transfer.start(1, baton, 0, range(half, PAGES))
    while time.monotonic() < began_at + SECONDS_MAX:
        for event in transfer.poll():
            if not isinstance(event, FetchLanded):
                raise TransferError(f"a fetch from itself ended with {event!r}")
            return half * PAGE_BYTES / (time.monotonic() - began_at)
    raise TransferError(f"a fetch from itself did not end within {SECONDS_MAX:g} s")


def main() -> None:
    """Print what was found and exit with 0, or print one sentence and exit with 1."""
    try:
        sys.stdout.write(f"{fetch_from_itself()}\n")
    except StartError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

"""How a fenced reader's successor is made: at once, or on a thread while the loop goes on.

A NIXL reader registers the whole pool. For host memory that took 7 to 16 ms for 4 GiB over shared memory and TCP, which
pin nothing. VRAM over RDMA is pinned page by page, and nobody has timed that here; on the loop's thread all streams of
the worker would wait for it. Meanwhile fetches go to the old reader, as they do while no reader can be had.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from shared.transfer.memory import PageMemory
from shared.transfer.reader import Reader

Begin = Callable[[Callable[[], Reader]], "Future[Reader]"]


def make_here(make: Callable[[], Reader]) -> Future[Reader]:
    """Make it now: the result is there, or the `TransferError` is."""
    made: Future[Reader] = Future()
    _make(make, made)
    return made


def make_on_thread(pages: PageMemory, make: Callable[[], Reader]) -> Future[Reader]:
    """Make it on a thread of its own. `pages` are those that it registers."""
    made: Future[Reader] = Future()

    def make_with_device() -> Reader:
        pages.access.read(pages.address, pages.access.buffer(1))  # a thread's first copy gives it the device
        return make()

    threading.Thread(target=_make, args=(make_with_device, made), name="kv-new-reader", daemon=True).start()
    return made


def _make(make: Callable[[], Reader], made: Future[Reader]) -> None:
    try:
        made.set_result(make())
    except Exception as error:  # whatever it is, it is the loop's to see
        made.set_exception(error)

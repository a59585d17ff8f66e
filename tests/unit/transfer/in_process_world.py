"""A reader and holders over the in-process transfer: the world that fetching is tested in without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shared.transfer.transfer import Transfer
from shared.wire.baton import Holder
from tests.doubles.in_process_transfer import InProcessFabric, InProcessOffer
from tests.fetcher_contract import (
    KV_FORMAT,
    LEASES,
    LIMITS,
    PAGE_BYTES,
    PAGE_SIZES,
    PAGES,
    Clock,
    FetchWorld,
    PageBuffer,
    byte_of,
    kv_format_of,
)


class InProcessHolder:
    """Implements `HolderUnderTest`."""

    def __init__(
        self, fabric: InProcessFabric, uid: str, clock: Callable[[], float], page_bytes: int = PAGE_BYTES
    ):
        self.fabric = fabric
        self.buffer = PageBuffer(page_bytes=page_bytes)
        for page in range(PAGES):
            self.buffer.fill(page, byte_of(page))
        offer = InProcessOffer(fabric, uid, 5, self.buffer.memory, LEASES)
        self.transfer = Transfer(offer, self.buffer.memory, KV_FORMAT, limits=LIMITS, clock=clock)

    @property
    def holder(self) -> Holder:
        return self.transfer.holder

    def write(self, lease: int, nonce: int, pages: Sequence[int] = ()) -> None:
        self.transfer.words.write(lease, nonce, pages or range(PAGES))

    def stamp(self, nonce: int, pages: Sequence[int]) -> None:
        for number, page in enumerate(pages):
            self.buffer.stamp(page, nonce, number)

    def clear(self, lease: int) -> None:
        self.transfer.words.clear(lease)

    def freeze(self) -> None:
        self.fabric.freeze(self.holder.agent)

    def thaw(self) -> None:
        self.fabric.thaw(self.holder.agent)

    def kill(self) -> None:
        self.fabric.kill(self.holder.agent)


def make_world(clock: Clock, dtype: str = "float8_e4m3fn") -> Iterator[FetchWorld]:
    """`dtype`: of the keys and values in all pages."""
    fabric, page_bytes, kv_format = InProcessFabric(), PAGE_SIZES[dtype], kv_format_of(dtype)
    buffer = PageBuffer(page_bytes=page_bytes)
    offer = InProcessOffer(fabric, "reader", 1, buffer.memory, LEASES)
    reader = Transfer(offer, buffer.memory, kv_format, limits=LIMITS, clock=clock)
    holders: list[InProcessHolder] = []  # kept alive: batons hold addresses of their memory

    def make_holder() -> InProcessHolder:
        holders.append(InProcessHolder(fabric, f"holder{len(holders)}", clock, page_bytes))
        return holders[-1]

    yield FetchWorld(reader, buffer, clock, make_holder, kv_format)
    reader.close()

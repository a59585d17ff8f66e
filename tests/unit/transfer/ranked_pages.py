"""Workers of several ranks, each with page memory of its own, whose pages together are those of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shared.links.keys import KeyPair, LinkKeys
from shared.transfer.memory import PageMemory, PageSlices
from shared.transfer.offer import Offer
from shared.transfer.ranks.commands import OfferPages, TablePlace
from shared.transfer.ranks.service import RankService
from shared.transfer.ranks.told_rank import ToldRank
from shared.transfer.transfer import FurtherRank, RankHere, Transfer
from shared.transfer.transports import KvNetwork
from shared.wire.baton import Baton, Holder
from tests.doubles.in_process_transfer import InProcessFabric, InProcessOffer
from tests.fetcher_contract import (
    KV_FORMAT,
    LEASES,
    LIMITS,
    PAGE_BYTES,
    PAGES,
    Clock,
    FetchWorld,
    PageBuffer,
    byte_of,
)
from tests.unit.transfer.cut_pages import POISON, Bytes, Cut


class RankedBuffer(PageBuffer):
    """Memory of all ranks of a worker, each with its slices and its known page."""

    def __init__(self, cut: Cut, pages: int = PAGES):
        self.cut = cut
        self.ranks = [rank_buffer(cut, rank, pages) for rank in range(cut.ranks)]

    @property
    def memory(self) -> PageMemory:  # type: ignore[override]  # rank 0's, which says how much all ranks have
        size = sum(buffer.memory.page_bytes for buffer in self.ranks)
        return replace(self.ranks[0].memory, page_bytes=size)

    def fill(self, page: int, byte: int) -> None:
        for buffer in self.ranks:
            buffer.fill(page, byte)

    def holds(self, page: int, byte: int) -> bool:
        return all(buffer.holds(page, byte) for buffer in self.ranks)

    def load(self, whole: Bytes) -> None:
        """Each rank gets its slices of whole pages: [pages, slices, slice_bytes]."""
        for rank, buffer in enumerate(self.ranks):
            content = self.cut.gather(whole, rank).tobytes()
            buffer.map[: len(content)] = content

    def poison(self) -> None:
        """All pages of the pool get bytes that no page of a test has."""
        for page in range(self.ranks[0].memory.pages):
            self.fill(page, POISON)

    def contents(self) -> list[bytes]:
        """All bytes of the pool, by rank."""
        return [buffer.map[: buffer.memory.pages * buffer.memory.page_bytes] for buffer in self.ranks]

    def gathered(self, whole: Bytes, sources: Sequence[int], targets: Sequence[int]) -> list[bytes]:
        """What the pool must hold, by rank, when these pages have arrived and nothing else."""
        pages, _, size = whole.shape
        held = np.full((self.ranks[0].memory.pages, self.cut.heads, size), POISON, np.uint8)
        held[list(targets)] = whole[list(sources)]
        assert pages > max(sources)
        return [self.cut.gather(held, rank).tobytes() for rank in range(self.cut.ranks)]


def rank_buffer(cut: Cut, rank: int, pages: int = PAGES) -> PageBuffer:
    """The memory of one rank."""
    held = cut.held[rank]
    return PageBuffer(pages, cut.page_bytes(rank), PageSlices(held.start, len(held), cut.heads))


@dataclass
class RankedWorker:
    """A worker of several ranks in this process."""

    buffer: RankedBuffer
    transfer: Transfer
    offers: list[Offer]
    served: ServedRanks | None = None  # the further ranks, if they are told

    def baton(self, pages: Sequence[int], lease: int = 3, nonce: int = 77) -> Baton:
        return Baton("r", 1, self.transfer.holder, KV_FORMAT, lease, nonce, 1, 1, tuple(pages))


MakeOffer = Callable[[PageMemory, int, Offer | None], Offer]  # of a rank; the offer is rank 0's, for others


def ranked_worker(
    cut: Cut, clock: Callable[[], float], make: MakeOffer, pages: int = PAGES, *, told: bool = False
) -> RankedWorker:
    buffer = RankedBuffer(cut, pages)
    memories = [each.memory for each in buffer.ranks]
    lead = make(memories[0], 0, None)
    offers = [lead, *(make(memory, rank, lead) for rank, memory in enumerate(memories) if rank)]
    served = ServedRanks(memories[1:], offers[1:]) if told else None
    ranks: Sequence[FurtherRank] = (
        served.told()
        if served
        else [RankHere(offer, memory) for offer, memory in zip(offers[1:], memories[1:], strict=True)]
    )
    transfer = Transfer(lead, memories[0], KV_FORMAT, limits=LIMITS, clock=clock, ranks=ranks)
    return RankedWorker(buffer, transfer, offers, served)


class ServedRanks:
    """The further ranks of a worker as if in processes: what is told lies there until they have a turn.

    Implements `RankPort`.
    """

    command_bytes_max = 1 << 20

    def __init__(self, memories: Sequence[PageMemory], offers: Sequence[Offer]):
        """Those of ranks 1, 2 …"""
        self._reported: list[list[bytes]] = [[] for _ in memories]
        self.services = [
            RankService(memory, lambda _, __, offer=offer: offer, reported.append)  # type: ignore[misc]
            for memory, offer, reported in zip(memories, offers, self._reported, strict=True)
        ]

    def tell(self, rank: int, command: bytes) -> None:
        self.services[rank - 1].tell(command)

    def reports(self, rank: int) -> list[bytes]:
        reported = self._reported[rank - 1]
        found = list(reported)
        reported.clear()
        return found

    def wait(self, rank: int, seconds: float) -> None:
        del seconds
        self.services[rank - 1].turn(0)

    def told(self) -> list[ToldRank]:
        """These ranks as rank 0 knows them, which have offered their pages."""
        ranks = [ToldRank(self, number) for number in range(1, len(self.services) + 1)]
        for each in ranks:
            each.ask_offer(offer_command())
        return ranks


def offer_command() -> OfferPages:
    """As rank 0 tells it; what is offered here is made beforehand."""
    network, keys = KvNetwork("nixl", "lo", "1-2"), LinkKeys(KeyPair(b"", b""), (), (), b"", b"")
    return OfferPages("a test", 0, network, keys, TablePlace(0, 0, 0))


def in_process(fabric: InProcessFabric, uid: str) -> MakeOffer:
    """Offers of one worker in the fabric."""
    return lambda memory, rank, _: InProcessOffer(fabric, uid, 5, memory, LEASES, rank)


class RankedHolder:
    """A holder of several ranks in this process. Implements `HolderUnderTest`."""

    def __init__(self, fabric: InProcessFabric, uid: str, clock: Clock, cut: Cut):
        self.fabric = fabric
        self.worker = ranked_worker(cut, clock, in_process(fabric, uid))
        for page in range(PAGES):
            self.worker.buffer.fill(page, byte_of(page))

    @property
    def holder(self) -> Holder:
        return self.worker.transfer.holder

    @property
    def agents(self) -> list[str]:
        return [self.holder.agent, *(rank.agent for rank in self.holder.ranks)]

    def write(self, lease: int, nonce: int, pages: Sequence[int] = ()) -> None:
        words = self.worker.transfer.words
        words.write(lease, nonce, pages or range(PAGES))

    def clear(self, lease: int) -> None:
        self.worker.transfer.words.clear(lease)

    def freeze(self) -> None:
        """The last of its ranks."""
        self.fabric.freeze(self.agents[-1])

    def thaw(self) -> None:
        self.fabric.thaw(self.agents[-1])

    def kill(self) -> None:
        """The first of its ranks, and then the others go with it."""
        for agent in self.agents:
            self.fabric.kill(agent)


HEADS = 8


def cut_of(ranks: int, heads: int = HEADS) -> Cut:
    """Pages of `PAGE_BYTES` in so many slices, on so many ranks."""
    return Cut(heads, ranks, PAGE_BYTES // heads)


def ranked_world(clock: Clock, readers: int, holders: int) -> Iterator[FetchWorld]:
    """A reader of so many ranks, which makes holders of so many."""
    fabric = InProcessFabric()
    reader = ranked_worker(cut_of(readers), clock, in_process(fabric, "reader"))
    made: list[RankedHolder] = []  # kept alive: batons hold addresses of their memory

    def make_holder() -> RankedHolder:
        made.append(RankedHolder(fabric, f"holder{len(made)}", clock, cut_of(holders)))
        return made[-1]

    yield FetchWorld(reader.transfer, reader.buffer, clock, make_holder)
    reader.transfer.close()

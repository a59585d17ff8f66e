"""The transfer of a rank other than 0, in its own process: it offers its pages and reads into them as it is told.

All of it happens on one thread, beside the one that launches steps: NIXL's agents belong to one thread. While reads
are under way it looks at them several thousand times a second, else it sleeps until it is told something, or has
something to count.

A read's end is reported when whatever computes with the pages sees its bytes; a read that FAILED stays with its reader
until that is closed, since nothing proves its end.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic

from shared.primitives.errors import StartError
from shared.transfer.counters import KvCounters, KvNumbers
from shared.transfer.memory import PageMemory
from shared.transfer.offer import Offer, describe_rank
from shared.transfer.rank_reader import RankReader
from shared.transfer.ranks.commands import (
    CloseOffer,
    CloseReader,
    Command,
    Counted,
    MakeReader,
    Offered,
    OfferPages,
    ReadEnded,
    ReaderClosed,
    ReaderMade,
    ReadKnownPage,
    ReadPages,
    Report,
    decode_command,
    encode,
)
from shared.transfer.ranks.shared_leases import SeenGrants, SharedLeases
from shared.transfer.reader import ENDED, NotPostedError, ReadState
from shared.transfer.transports import open_offer

LOOK_SECONDS = 0.0002  # between two looks at reads that are under way
COUNT_SECONDS = 0.5  # between two reports of what was counted
WORDS_READ = 1  # rank 0 reads the words, so one slot for them is more than enough


MakeOffer = Callable[[OfferPages, PageMemory], Offer]  # `StartError` in one sentence when it cannot be had
MapMemory = Callable[[int, int], memoryview]  # what ranks share, by its offset and size in bytes


def offer_of(rank: int, map_memory: MapMemory) -> MakeOffer:
    """How a rank of this machine offers its pages, under the leases that it finds in the shared table."""

    def offer(told: OfferPages, pages: PageMemory) -> Offer:
        place = told.table
        memory = map_memory(place.offset, SharedLeases.bytes_for(place.leases, place.pages_max))
        grants = SeenGrants(SharedLeases(memory, place.leases, place.pages_max))
        identity = told.uid, told.epoch
        return open_offer(told.network, told.keys, identity, pages, place.leases, rank=rank, grants=grants)

    return offer


class RankService:
    """Does what rank 0 tells about KV, in `run`; other threads hand it commands."""

    def __init__(self, pages: PageMemory, make_offer: MakeOffer, report: Callable[[bytes], None]):
        self._pages = pages
        self._make_offer = make_offer
        self._report_bytes = report
        self._told = SimpleQueue[bytes]()
        self._offer: Offer | None = None
        self._readers: dict[int, RankReader] = {}
        self._reads: dict[tuple[int, int], int] = {}  # by generation and read, what the reader calls it
        self._counted: KvNumbers = KvCounters().as_numbers()  # as it was reported last
        self._count_at = 0.0

    def tell(self, command: bytes) -> None:
        """Hand over a command; from any thread."""
        self._told.put(command)

    def run(self, on_error: Callable[[BaseException], None]) -> None:
        """Do what is told, for ever."""
        try:
            self._pages.access.enter()
            while True:
                self.turn(LOOK_SECONDS if self._reads else COUNT_SECONDS)
        except BaseException as error:  # whatever it is, this rank cannot go on without its transfer
            on_error(error)

    def turn(self, seconds: float) -> None:
        """Do a command if one comes within so long, then look at the reads that are under way, and report counts."""
        try:
            command = self._told.get(timeout=seconds)
        except Empty:
            pass
        else:
            self._do(decode_command(command))
        for (generation, read), handle in list(self._reads.items()):
            self._look_at(generation, read, handle)
        if (now := monotonic()) >= self._count_at:
            self._count_at = now + COUNT_SECONDS
            self._count()

    def _do(self, command: Command) -> None:
        match command:
            case OfferPages():
                self._report(self._offered(command))
            case MakeReader(generation):
                self._report(self._made(generation))
            case ReadPages() | ReadKnownPage():
                self._post(command)
            case CloseReader(generation):
                if reader := self._readers.pop(generation, None):
                    reader.close()
                self._reads = {each: at for each, at in self._reads.items() if each[0] != generation}
                self._report(ReaderClosed(generation))
            case CloseOffer():
                if self._offer:
                    self._offer.close()

    def _offered(self, told: OfferPages) -> Offered:
        try:
            self._offer = self._make_offer(told, self._pages)
        except StartError as error:
            return Offered(None, str(error))
        if self._pages.known_pages:
            self._pages.write_known_bytes(self._pages.known_page)
        return Offered(describe_rank(self._offer.holder, self._pages))

    def _made(self, generation: int) -> ReaderMade:
        try:
            self._readers[generation] = self._reader()
        except StartError as error:
            return ReaderMade(generation, str(error))
        return ReaderMade(generation)

    def _reader(self) -> RankReader:
        assert self._offer is not None, "pages are offered first"
        return RankReader(self._offer.make_reader(WORDS_READ), self._pages)

    def _post(self, told: ReadPages | ReadKnownPage) -> None:
        reader = self._readers[told.generation]
        try:
            if isinstance(told, ReadPages):
                handle = reader.read_pages(told.baton, told.of.part, told.sources, told.targets)
            else:
                handle = reader.read_known_page(told.baton, told.of.part, told.target)
        except NotPostedError as error:
            self._report(ReadEnded(told.generation, told.read, ReadState.REFUSED, str(error)))
            return
        self._reads[told.generation, told.read] = handle

    def _look_at(self, generation: int, read: int, handle: int) -> None:
        reader = self._readers[generation]
        state = reader.state(handle)
        if state is ReadState.READING:
            return
        del self._reads[generation, read]
        if state in ENDED:
            reader.settle()
            reader.release(handle)
        self._report(ReadEnded(generation, read, state))

    def _count(self) -> None:
        """Report what has happened at the port, if something has."""
        if self._offer and (numbers := self._offer.counters.as_numbers()) != self._counted:
            self._counted = numbers
            self._report(Counted(numbers))

    def _report(self, report: Report) -> None:
        self._report_bytes(encode(report))

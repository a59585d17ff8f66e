"""What rank 0 tells another rank of its worker about KV, and what that rank reports.

    down    OfferPages ─ MakeReader ─ ReadPages, ReadKnownPage … ─ CloseReader ─ CloseOffer
    up      Offered      ReaderMade   ReadEnded …  Counted …       ReaderClosed

Both ends are of one release and one machine, so nothing here is kept for others. They travel in order
(`shared.worker.rank_channel`); a command has at most `COMMAND_BYTES_MAX` bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shared.links.keys import LinkKeys
from shared.transfer.counters import KvNumbers
from shared.transfer.reader import ReadState
from shared.transfer.slices import WHOLE, RankPages, SlicePart
from shared.transfer.transports import KvNetwork
from shared.wire.baton import Baton, HolderRank


class TablePlace(msgspec.Struct, frozen=True):
    """Where the table of leases lies in the memory that ranks share, see `shared_leases`."""

    offset: int
    leases: int
    pages_max: int


class OfferPages(msgspec.Struct, frozen=True, tag=True):
    """Let other workers read this rank's pages."""

    uid: str
    epoch: int
    network: KvNetwork
    keys: LinkKeys
    table: TablePlace


class MakeReader(msgspec.Struct, frozen=True, tag=True):
    """Begin a generation of reads."""

    generation: int


class PartOfPages(msgspec.Struct, frozen=True):
    """A `SlicePart` in numbers: where pages begin, and what is taken of each, in bytes."""

    source_address: int
    source_page_bytes: int
    source_offset: int
    target_address: int
    target_page_bytes: int
    target_offset: int
    size_bytes: int

    @classmethod
    def of(cls, part: SlicePart) -> PartOfPages:
        """What the rank that reads needs of it."""
        source, target = part.source_pages, part.target_pages
        return cls(
            source.address,
            source.page_bytes,
            part.source_offset,
            target.address,
            target.page_bytes,
            part.target_offset,
            part.size_bytes,
        )

    @property
    def part(self) -> SlicePart:
        """For a reader whose holder is one rank already; which slices these are is not known here any more."""
        source = RankPages(self.source_address, self.source_page_bytes, WHOLE)
        target = RankPages(self.target_address, self.target_page_bytes, WHOLE)
        offsets = self.source_offset, self.target_offset
        return SlicePart(0, 0, source, target, WHOLE, *offsets, self.size_bytes)


class ReadPages(msgspec.Struct, frozen=True, tag=True):
    """Post a read; the baton's holder is the rank that is read, and its pages are left out."""

    generation: int
    read: int
    baton: Baton
    of: PartOfPages
    sources: Sequence[int]
    targets: Sequence[int]


class ReadKnownPage(msgspec.Struct, frozen=True, tag=True):
    """Post a read of the holder's known page."""

    generation: int
    read: int
    baton: Baton
    of: PartOfPages
    target: int


class CloseReader(msgspec.Struct, frozen=True, tag=True):
    """Destroy a reader."""

    generation: int


class CloseOffer(msgspec.Struct, frozen=True, tag=True):
    """Let nobody read here any more."""


Command = OfferPages | MakeReader | ReadPages | ReadKnownPage | CloseReader | CloseOffer


class Offered(msgspec.Struct, frozen=True, tag=True):
    """How others reach this rank's pages; or why they cannot be offered."""

    rank: HolderRank | None
    refusal: str = ""


class ReaderMade(msgspec.Struct, frozen=True, tag=True):
    """A generation can be used; or why it could not be made."""

    generation: int
    refusal: str = ""


class ReadEnded(msgspec.Struct, frozen=True, tag=True):
    """A read is in this state, its last one."""

    generation: int
    read: int
    state: ReadState
    refusal: str = ""


class ReaderClosed(msgspec.Struct, frozen=True, tag=True):
    """Nothing lands any more of this generation."""

    generation: int


class Counted(msgspec.Struct, frozen=True, tag=True):
    """What has happened at this rank's port so far."""

    numbers: KvNumbers


Report = Counted | Offered | ReaderMade | ReadEnded | ReaderClosed

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode

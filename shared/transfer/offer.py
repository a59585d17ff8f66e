"""What a rank offers by a transport (`nixl`, `tls`), and how others reach it: its part of a `Holder`."""

from __future__ import annotations

from typing import Protocol

from shared.transfer.counters import KvCounters
from shared.transfer.grants import Grants
from shared.transfer.memory import PageMemory, WordTable
from shared.transfer.reader import Reader
from shared.wire.baton import Holder, HolderRank, agent_name, rank_agent_name


class Offer(Protocol):
    """This worker's pages and lease words, as others reach them by one transport, from its making until `close`."""

    @property
    def holder(self) -> Holder:
        """See `Fetcher.holder`."""

    @property
    def words(self) -> WordTable | Grants:
        """The lease words that are offered."""

    @property
    def counters(self) -> KvCounters:
        """What has been refused and fetched so far."""

    def make_reader(self, slots: int) -> Reader:
        """A fresh reader with so many slots for lease words."""

    def close(self) -> None:
        """From now on no other worker can read from here."""


def describe_holder(
    uid: str, epoch: int, metadata: bytes, pages: PageMemory, words_address: int, rank: int = 0
) -> Holder:
    """How other workers reach this memory of a rank, as if it were alone (`describe_rank` says the rest).

    `words_address` is 0 where no peer reads lease words out of memory.
    """
    return Holder(
        uid=uid,
        epoch=epoch,
        agent=rank_agent_name(uid, epoch, rank) if rank else agent_name(uid, epoch),
        metadata=metadata,
        pages_address=pages.address,
        page_bytes=pages.page_bytes,
        words_address=words_address,
        device_id=pages.device_id,
        memory=pages.memory,
        known_page=pages.known_page,
        slices=pages.slices.count,
    )


def describe_rank(alone: Holder, pages: PageMemory) -> HolderRank:
    """How other workers reach a further rank, which `describe_holder` has described as if it were alone."""
    slices = pages.slices
    return HolderRank(
        alone.agent,
        alone.metadata,
        alone.pages_address,
        slices.first,
        slices.count,
        alone.device_id,
        alone.memory,
    )

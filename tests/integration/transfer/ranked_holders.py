"""A holder whose ranks are processes, each with its slices of the same pages."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from shared.transfer.offer import describe_rank
from shared.transfer.protocol import KvTransport
from shared.wire.baton import Holder
from tests.fetcher_contract import PageBuffer
from tests.integration.transfer.holder_processes import HolderProcess, epochs
from tests.unit.transfer.cut_pages import Bytes, Cut, whole_pages
from tests.unit.transfer.ranked_pages import rank_buffer

POOL = 64  # pages of each worker


@dataclass(frozen=True, slots=True)
class HeldRank:
    """Which rank of which worker a process is."""

    cut: Cut
    rank: int

    def buffer(self) -> PageBuffer:
        """Its memory."""
        return rank_buffer(self.cut, self.rank, POOL)


def whole_pages_here(cut: Cut) -> Bytes:
    """The pages that every holder has, all ranks together."""
    return whole_pages(POOL, cut.heads, cut.slice_bytes)


class RankedProcesses:
    """A holder of several processes. Implements `HolderUnderTest`, where a rank is meant by its number."""

    def __init__(self, cut: Cut, transport: KvTransport):
        epoch = next(epochs)

        def begin(rank: int) -> HolderProcess:
            which = msgspec.json.encode(HeldRank(cut, rank)).decode()
            return HolderProcess("p", epoch, POOL, cut.page_bytes(rank), transport, rank=which)

        with ThreadPoolExecutor(cut.ranks) as starters:
            self.ranks = list(starters.map(begin, range(cut.ranks)))
        lead, *others = (each.holder for each in self.ranks)
        described = tuple(
            describe_rank(alone, HeldRank(cut, rank).buffer().memory)
            for rank, alone in enumerate(others, start=1)
        )
        self.holder: Holder = msgspec.structs.replace(lead, ranks=described)

    def write(self, lease: int, nonce: int, pages: Sequence[int] = ()) -> None:
        """Rank 0 last: whoever is given the baton finds the lease at all of them."""
        for rank in reversed(self.ranks):
            rank.write(lease, nonce, pages)

    def clear(self, lease: int) -> None:
        """Rank 0 first: its word is the lease's."""
        for rank in self.ranks:
            rank.clear(lease)

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.kill()

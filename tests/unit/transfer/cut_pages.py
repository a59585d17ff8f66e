"""Pages of a whole model, cut into the slices of ranks: what a test compares with what a reader got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shared.wire.baton import Holder, HolderRank, agent_name, rank_agent_name

Bytes = NDArray[np.uint8]


def slices_held(heads: int, ranks: int) -> list[range]:
    """The slices of each rank, as `ModelShare.kv_heads` has them; a number that does not divide is cut as well.

    Said here once more, for that module loads torch, which takes seconds.
    """
    if heads >= ranks:
        each, more = divmod(heads, ranks)
        starts = [rank * each + min(rank, more) for rank in range(ranks + 1)]
        return [range(start, stop) for start, stop in pairwise(starts)]
    return [range(own, own + 1) for own in (rank * heads // ranks for rank in range(ranks))]


@dataclass(frozen=True, slots=True)
class Cut:
    """A worker that has so many ranks, whose pages have so many slices."""

    heads: int
    ranks: int
    slice_bytes: int

    @property
    def held(self) -> list[range]:
        return slices_held(self.heads, self.ranks)

    def page_bytes(self, rank: int) -> int:
        return len(self.held[rank]) * self.slice_bytes

    def holder(self, addresses: Sequence[int], uid: str = "p", epoch: int = 1) -> Holder:
        """A holder whose ranks have their pages at these addresses."""
        ranks = tuple(
            HolderRank(rank_agent_name(uid, epoch, rank), b"", address, held.start, len(held))
            for rank, (address, held) in enumerate(zip(addresses, self.held, strict=True))
        )
        first = ranks[0].slices
        size = first * self.slice_bytes
        own = agent_name(uid, epoch)
        return Holder(uid, epoch, own, b"", addresses[0], size, 0, slices=first, ranks=ranks[1:])

    def gather(self, whole: Bytes, rank: int) -> Bytes:
        """A rank's part of whole pages: [pages, bytes] of [pages, slices, slice_bytes]."""
        held = self.held[rank]
        return whole[:, held.start : held.stop].reshape(len(whole), -1)


def whole_pages(pages: int, heads: int, slice_bytes: int, seed: int = 0) -> Bytes:
    """[pages, slices, slice_bytes], no two slices of them alike, and no byte `POISON`."""
    return np.random.default_rng(seed).integers(0, 250, (pages, heads, slice_bytes), dtype=np.uint8)


POISON = 255

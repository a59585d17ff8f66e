"""What each rank of a reading worker takes of a holder's pages, whatever number of ranks (GPUs) either of them has.

A worker of several ranks cuts each page into slices, one for each KV head of the model; a rank's page is the slices
that it holds, one behind the other. A slice has as many bytes in all workers of one KV format. So whatever a rank wants
of another one's page is one span, contiguous at both ends:

    holder of 2 ranks    | 0 1 2 3 | 4 5 6 7 |
    reader of 4          | 0 1 | 2 3 | 4 5 | 6 7 |      rank 1 takes the second half of each page of the holder's rank 0

A *part* is what one rank reads from one source: as many spans as pages. Where several ranks hold a slice, since they
are more than the heads, readers take them in turn. No ratio is refused. Pages that are not cut are the case of one
slice: neighbours on both sides become one span.

Knows no transport. Every number of a holder is a peer's: `refusal` comes before all else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shared.transfer.memory import RANKS_MAX
from shared.transfer.reader import Span
from shared.wire.baton import Holder, HolderRank, rank_agent_name

WHOLE = range(1)  # of pages that are not cut: the only slice


class RankPages(NamedTuple):
    """Where the pages of one rank lie, and the slices of each that they hold."""

    address: int
    page_bytes: int
    slices: range


class SlicePart(NamedTuple):
    """What one rank of the reader takes from one rank of the holder, of each page. Sizes are in bytes."""

    rank: int
    source: int  # rank of the holder
    source_pages: RankPages
    target_pages: RankPages
    slices: range
    source_offset: int  # within a page
    target_offset: int
    size_bytes: int

    def spans(self, sources: Sequence[int], targets: Sequence[int]) -> list[Span]:
        """What to copy for these pages of the holder, into these of the reader; what is in a row becomes one span."""
        spans: list[Span] = []
        size, source_bytes, target_bytes = (
            self.size_bytes,
            self.source_pages.page_bytes,
            self.target_pages.page_bytes,
        )
        first_source = self.source_pages.address + self.source_offset
        first_target = self.target_pages.address + self.target_offset
        for source_page, target_page in zip(sources, targets, strict=True):
            source = first_source + source_page * source_bytes
            target = first_target + target_page * target_bytes
            last = spans[-1] if spans else None
            if last and (last.source + last.size_bytes, last.target + last.size_bytes) == (source, target):
                spans[-1] = Span(last.source, last.target, last.size_bytes + size)
            else:
                spans.append(Span(source, target, size))
        return spans


def parts_of(own: Holder, peer: Holder) -> tuple[SlicePart, ...]:
    """What a worker that is `own` reads of the pages of `peer`, which `refusal` has found sound."""
    if not own.slices:
        size = own.page_bytes
        source_pages = RankPages(peer.pages_address, size, WHOLE)
        target_pages = RankPages(own.pages_address, size, WHOLE)
        return (SlicePart(0, 0, source_pages, target_pages, WHOLE, 0, 0, size),)
    slice_bytes = own.page_bytes // own.slices
    held = ranks_of(peer)
    parts: list[SlicePart] = []
    for rank, pages in enumerate(ranks_of(own)):
        for source, taken in taken_by(rank, pages.slices, [each.slices for each in held]):
            source_offset = (taken.start - held[source].slices.start) * slice_bytes
            target_offset = (taken.start - pages.slices.start) * slice_bytes
            size = len(taken) * slice_bytes
            parts.append(
                SlicePart(rank, source, held[source], pages, taken, source_offset, target_offset, size)
            )
    return tuple(parts)


def taken_by(rank: int, wanted: range, held: Sequence[range]) -> list[tuple[int, range]]:
    """From which source a rank takes which of the slices that it wants; `held` are those of each source."""
    taken: list[tuple[int, range]] = []
    for number in wanted:
        sources = [source for source, slices in enumerate(held) if number in slices]
        source = sources[rank % len(sources)]
        if taken and taken[-1][0] == source:
            taken[-1] = (source, range(taken[-1][1].start, number + 1))
        else:
            taken.append((source, range(number, number + 1)))
    return taken


def ranks_of(holder: Holder) -> list[RankPages]:
    """The pages of each rank of a worker; of one that is not cut the page is its only slice."""
    slices = max(1, holder.slices)
    slice_bytes = holder.page_bytes // slices
    others = (
        RankPages(
            rank.pages_address,
            rank.slices * slice_bytes,
            range(rank.first_slice, rank.first_slice + rank.slices),
        )
        for rank in holder.ranks
    )
    return [RankPages(holder.pages_address, holder.page_bytes, range(slices)), *others]


def slices_of(holder: Holder) -> int:
    """Into how many slices the worker cuts a page; 1 where it does not."""
    return max(pages.slices.stop for pages in ranks_of(holder))


# ---- what is wrong with a holder ------------------------------------------------------------------------------------


def refusal(own: Holder, peer: Holder) -> str:
    """Why a worker that is `own` cannot read the pages of `peer`; empty: their sizes and ranks are sound."""
    ranks = 1 + len(peer.ranks)
    if not own.slices:
        if peer.slices or peer.ranks:
            return f"{peer.name} has its pages in slices on {ranks} GPUs, and this worker has whole ones"
        if peer.page_bytes != own.page_bytes:
            return f"{peer.name} has pages of {peer.page_bytes} bytes, this worker {own.page_bytes}"
        return ""
    if not peer.slices:
        return f"{peer.name} has whole pages, and this worker has slices of them on {1 + len(own.ranks)} GPUs"
    if ranks > RANKS_MAX:
        return f"{peer.name} has its pages on {ranks} GPUs, more than {RANKS_MAX}"
    if reason := _odd_slices(own, peer) or _odd_ranks(peer):
        return f"{peer.name} {reason}"
    return ""


def _odd_slices(own: Holder, peer: Holder) -> str:
    size, own_size = peer.page_bytes / peer.slices, own.page_bytes // own.slices
    if size != own_size:
        return f"has pages of {peer.page_bytes} bytes in {peer.slices} slices, and this worker's slices have {own_size}"
    count = slices_of(own)
    held = [pages.slices for pages in ranks_of(peer)]
    for rank, slices in enumerate(held):
        if not slices or slices.stop > count:
            return f"has {len(slices)} slices from {slices.start} on at rank {rank}, and a page has {count}"
    missing = [number for number in range(count) if not any(number in slices for slices in held)]
    return f"has no rank with slice {missing[0]} of {count}" if missing else ""


def _odd_ranks(peer: Holder) -> str:
    """Ranks that are reached by one name or at one place are one, and would be read in place of each other."""
    for number, rank in enumerate(peer.ranks, start=1):
        if rank.agent != rank_agent_name(peer.uid, peer.epoch, number):
            return f"names the agent {rank.agent!r} for rank {number}, which is not its own"
    places = [place for place in (peer.metadata, *_metadata(peer.ranks)) if place]
    if len(set(places)) < len(places):
        return "has two ranks that are reached at one place"
    return ""


def _metadata(ranks: Iterable[HolderRank]) -> Iterable[bytes]:
    return (rank.metadata for rank in ranks)

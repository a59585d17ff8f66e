"""What ranks take of each other's pages is a plain gather of slices, for any two numbers of ranks."""

from __future__ import annotations

import re
from itertools import pairwise, product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.checkpoint.model_config import parse_model_config
from shared.engine.parallel.shares import ModelShare, Share
from shared.transfer.slices import SlicePart, parts_of, refusal, slices_of, taken_by
from shared.wire.baton import Holder, HolderRank, agent_name, rank_agent_name
from tests.unit.engine.checkpoint.published_models import PUBLISHED
from tests.unit.transfer.cut_pages import POISON, Cut, slices_held, whole_pages

RANKS = (1, 2, 4, 8, 16)
PAIRS = list(product(RANKS, RANKS))
PAGES, GUARD = 6, 64  # pages of each memory; bytes around it that nothing may write
SLICE_BYTES = 24


def workers(heads: int, p: int, d: int) -> tuple[Cut, Cut, Holder, Holder]:
    """A holder of p ranks and a reader of d, each with the memories of its ranks one behind the other."""
    cuts = Cut(heads, p, SLICE_BYTES), Cut(heads, d, SLICE_BYTES)
    holders = []
    for uid, cut in zip("pd", cuts, strict=True):
        addresses, begin = [], GUARD
        for rank in range(cut.ranks):
            addresses.append(begin)
            begin += PAGES * cut.page_bytes(rank) + GUARD
        holders.append(cut.holder(addresses, uid))
    return cuts[0], cuts[1], holders[0], holders[1]


def memory_of(cut: Cut, holder: Holder, whole: np.ndarray[Any, np.dtype[np.uint8]] | None) -> bytearray:
    """All bytes of a worker: poison, and its ranks' parts of the whole pages."""
    end = GUARD + sum(PAGES * cut.page_bytes(rank) + GUARD for rank in range(cut.ranks))
    memory = bytearray([POISON]) * end
    if whole is not None:
        for rank, address in enumerate(
            [holder.pages_address, *(each.pages_address for each in holder.ranks)]
        ):
            part = cut.gather(whole, rank).tobytes()
            memory[address : address + len(part)] = part
    return memory


def move(
    parts: tuple[SlicePart, ...], sources: list[int], targets: list[int], read: bytes, into: bytearray
) -> int:
    """Copy what the parts name; returns the number of spans."""
    count = 0
    for part in parts:
        for span in part.spans(sources, targets):
            into[span.target : span.target + span.size_bytes] = read[
                span.source : span.source + span.size_bytes
            ]
            count += 1
    return count


@given(
    st.sampled_from(PAIRS),
    st.integers(1, 16),
    st.permutations(range(PAGES)),
    st.permutations(range(PAGES)),
    st.integers(0, PAGES),
)
def test_a_fetch_is_a_gather_and_touches_nothing_else(
    pair: tuple[int, int], heads: int, sources: list[int], targets: list[int], count: int
) -> None:
    sources, targets = sources[:count], targets[:count]
    p_cut, d_cut, p, d = workers(heads, *pair)
    assert refusal(d, p) == ""
    whole = whole_pages(PAGES, heads, SLICE_BYTES)
    into = memory_of(d_cut, d, None)
    move(parts_of(d, p), sources, targets, bytes(memory_of(p_cut, p, whole)), into)
    expected = np.full_like(whole, POISON)
    expected[targets] = whole[sources]
    assert into == memory_of(d_cut, d, expected), (
        "each target page is the gather, and no other byte was written"
    )


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_spans_of_a_fetch_are_pages_by_sources(p: int, d: int, heads: int) -> None:
    """Of pages that are no neighbours. A rank has as many sources as its slices have holders, and no more."""
    _, d_cut, holder, own = workers(heads, p, d)
    parts = parts_of(own, holder)
    spans = [len(part.spans([0, 2, 4], [1, 3, 5])) for part in parts]
    assert spans == [3] * len(parts)
    if heads % p == 0 or p % heads == 0:
        each = max(1, min(heads, p) // min(heads, d))
        assert len(parts) == d * each
    else:
        assert len(parts) <= d * min(p, max(map(len, d_cut.held)))


def test_neighbours_on_both_sides_are_one_span_where_a_rank_reads_all_of_its_source() -> None:
    _, _, holder, own = workers(8, 4, 4)
    assert [len(part.spans([1, 2, 3], [2, 3, 4])) for part in parts_of(own, holder)] == [1] * 4
    _, _, holder, own = workers(8, 4, 2)
    assert {len(part.spans([1, 2, 3], [2, 3, 4])) for part in parts_of(own, holder)} == {3}


def test_readers_of_a_slice_that_several_ranks_hold_take_turns() -> None:
    """16 ranks read 8 that hold two slices, four each: two readers for each source."""
    _, _, holder, own = workers(2, 8, 16)
    read = [part.source for part in parts_of(own, holder)]
    assert sorted(read) == sorted([*range(8)] * 2)


def test_a_worker_reads_each_of_its_ranks_from_the_rank_itself() -> None:
    for heads, ranks in product((1, 2, 8), RANKS):
        _, _, holder, _ = workers(heads, ranks, 1)
        assert all(part.source == part.rank for part in parts_of(holder, holder))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_slices_are_the_heads_that_a_share_of_the_model_has(name: str) -> None:
    config = parse_model_config(PUBLISHED[name].config)
    for ranks in (1, 2, 4):
        if config.heads % ranks or (config.kv_heads % ranks and ranks % config.kv_heads):
            continue
        held = slices_held(config.kv_heads, ranks)
        try:
            shares = [ModelShare(config, Share(rank, ranks)) for rank in range(ranks)]
        except Exception:  # it cannot be cut for another reason
            continue
        assert held == [share.kv_heads for share in shares]


def test_pages_that_are_not_cut_are_read_whole() -> None:
    own, peer = whole_holder("d", 4096, 1 << 20), whole_holder("p", 4096, 1 << 22)
    [part] = parts_of(own, peer)
    assert (part.rank, part.source, part.size_bytes) == (0, 0, 4096)
    spans = part.spans([3, 4, 9], [5, 6, 7])
    assert [(span.source - (1 << 22), span.target - (1 << 20), span.size_bytes) for span in spans] == [
        (3 * 4096, 5 * 4096, 8192),
        (9 * 4096, 7 * 4096, 4096),
    ]


def test_no_slice_is_taken_twice_nor_left_out() -> None:
    for heads, p, d in product(range(1, 17), RANKS, RANKS):
        held = slices_held(heads, p)
        for rank, wanted in enumerate(slices_held(heads, d)):
            taken = taken_by(rank, wanted, held)
            assert [number for _, slices in taken for number in slices] == list(wanted)
            assert all(set(slices) <= set(held[source]) for source, slices in taken)
            assert all(first[0] != second[0] for first, second in pairwise(taken))


# ---- holders that are not sound -------------------------------------------------------------------------------------


def whole_holder(uid: str, page_bytes: int, address: int) -> Holder:
    return Holder(uid, 1, agent_name(uid, 1), b"", address, page_bytes, 0)


OWN = Cut(8, 2, 64).holder([0, 1000], "d")
PEER = Cut(8, 4, 64).holder([0, 1000, 2000, 3000], "p")
NAME = re.escape(PEER.name)


def with_rank(number: int, **changes: Any) -> Holder:
    """The peer with another rank of this number, from 1 on."""
    ranks = list(PEER.ranks)
    ranks[number - 1] = msgspec.structs.replace(ranks[number - 1], **changes)
    return msgspec.structs.replace(PEER, ranks=tuple(ranks))


UNSOUND = {
    "whole pages": (
        msgspec.structs.replace(PEER, slices=0, ranks=()),
        "has whole pages, and this worker has slices",
    ),
    "too many ranks": (
        msgspec.structs.replace(
            PEER, ranks=tuple(HolderRank(rank_agent_name("p", 1, n), b"", 0, 0, 2) for n in range(1, 17))
        ),
        "on 17 GPUs, more than 16",
    ),
    "slices that do not divide": (
        msgspec.structs.replace(PEER, slices=3),
        "pages of 128 bytes in 3 slices, and this worker's slices have 64",
    ),
    "slices of another size": (
        msgspec.structs.replace(PEER, page_bytes=256),
        "pages of 256 bytes in 2 slices, and this worker's slices have 64",
    ),
    "no slice": (with_rank(2, slices=0), "0 slices from 4 on at rank 2, and a page has 8"),
    "slices beyond the last": (with_rank(3, slices=1 << 40), "slices from 6 on at rank 3, and a page has 8"),
    "a slice that nobody has": (with_rank(2, first_slice=2), "no rank with slice 4 of 8"),
    "a name twice": (with_rank(2, agent=PEER.ranks[0].agent), "for rank 2, which is not its own"),
    "another's name": (with_rank(1, agent=agent_name("q", 1)), "for rank 1, which is not its own"),
    "a place twice": (
        msgspec.structs.replace(with_rank(1, metadata=b"here"), metadata=b"here"),
        "two ranks that are reached at one place",
    ),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_a_holder_with_unsound_ranks_is_refused_in_a_sentence(name: str) -> None:
    holder, sentence = UNSOUND[name]
    said = refusal(OWN, holder)
    assert sentence in said
    assert re.match(NAME, said)


def test_a_worker_with_whole_pages_reads_none_that_are_cut() -> None:
    assert "in slices on 4 GPUs" in refusal(whole_holder("d", 512, 0), PEER)
    assert "pages of 512 bytes" in refusal(whole_holder("d", 128, 0), whole_holder("p", 512, 0))


def test_a_sound_holder_is_not_refused() -> None:
    assert refusal(OWN, PEER) == ""
    assert slices_of(PEER) == 8
    alone = Cut(8, 1, 64).holder([0], "p")
    assert refusal(OWN, alone) == refusal(alone, OWN) == ""


def test_no_worker_is_named_as_a_rank_of_another() -> None:
    """Neither is what comes of a uid that ends as a rank does."""
    names = {agent_name(uid, 1) for uid in ("p", "p.1", f"{agent_name('p', 1)}.1")}
    assert not names & {rank_agent_name("p", 1, rank) for rank in range(64)}

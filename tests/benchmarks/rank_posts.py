"""What posting a fetch costs the loop of a worker of several ranks: `python -m tests.benchmarks.rank_posts`.

4,096 tokens of Llama-70B's shape: 256 pages of 16 tokens, 8 KV heads, 640 KiB of each a page. Rank 0's own reads cost
their spans, those of others a command through the real ring to processes that only answer. Prints CPU time of the
thread, the least and the median of 30 fetches; goal: 1 ms.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from statistics import median
from time import thread_time

from shared.engine.parallel.orders import OrderKind, command_of
from shared.transfer.fetches import FetchLimits, read_batches
from shared.transfer.rank_reader import PartReader
from shared.transfer.ranks.commands import (
    MakeReader,
    ReadEnded,
    ReaderMade,
    ReadPages,
    decode_command,
    encode,
)
from shared.transfer.ranks.told_rank import ToldRank
from shared.transfer.reader import ReadState
from shared.transfer.slices import SlicePart, parts_of
from shared.wire.baton import Baton, Holder, HolderRank, agent_name, rank_agent_name
from shared.worker.rank_channel import FollowerEnd, LeaderEnd
from tests.waiting import until

PAGES, HEADS, SLICE_BYTES = 256, 8, 640 << 10
PAIRS = ((1, 2), (4, 2), (2, 4), (1, 8), (2, 8), (8, 8))  # ranks of prefill, of decode
METADATA = bytes(446)  # as long as NIXL's on loopback
RUNS = 30


def holder(uid: str, ranks: int) -> Holder:
    """A worker of so many ranks, whose memory nobody looks at."""
    each = HEADS // ranks
    others = tuple(
        HolderRank(rank_agent_name(uid, 5, rank), METADATA, (rank + 1) << 40, rank * each, each)
        for rank in range(1, ranks)
    )
    own = agent_name(uid, 5), METADATA, 1 << 40, each * SLICE_BYTES, 1 << 20
    return Holder(uid, 5, *own, slices=each, ranks=others)


def answer(end: FollowerEnd, rank: int) -> None:
    """A follower that says of each read that it is done."""
    end.open(0)
    while (order := end.take()) is not None and order.kind is not OrderKind.END:
        told = order.kind is OrderKind.KV and order.name == rank
        command = decode_command(command_of(order)) if told else None
        end.give_back()
        match command:
            case MakeReader(generation):
                end.tell_kv(encode(ReaderMade(generation)))
            case ReadPages(generation, read):
                end.tell_kv(encode(ReadEnded(generation, read, ReadState.DONE)))


class OwnReader:
    """Rank 0's reads: their spans, and nothing else."""

    def read_pages(self, _: Baton, part: SlicePart, sources: Sequence[int], targets: Sequence[int]) -> int:
        """See `PartReader`."""
        return len(part.spans(sources, targets))


def all_done(reads: Sequence[tuple[PartReader, int]]) -> bool:
    """Whether all of these reads have ended."""
    for reader, _ in reads:
        reader.look()
    return all(reader.state(read) is ReadState.DONE for reader, read in reads)


def posted(prefill: int, decode: int) -> tuple[int, list[float]]:
    """Commands told for a fetch, and CPU seconds of each of some fetches."""
    memory = os.memfd_create("orders")
    sockets = []
    for rank in range(1, decode):
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            own.close()
            answer(FollowerEnd(theirs, memory), rank)
            os._exit(0)
        theirs.close()
        sockets.append(own)
    lead = LeaderEnd(sockets, memory)
    lead.open(0)
    others = [ToldRank(lead, rank).make_reader() for rank in range(1, decode)]
    parts = parts_of(holder("d", decode), peer := holder("p", prefill))
    baton = Baton("r", 1, peer, "kv", 3, 77, 16 * PAGES, 16 * PAGES, tuple(range(PAGES)))
    own_reader, seconds, told = OwnReader(), [], 0
    for _ in range(RUNS):
        under_way = []
        before = thread_time()
        batches = read_batches(parts, baton.pages, range(PAGES), FetchLimits(1, 10, 10))
        while batches:
            part, sources, targets, _ = batches.pop()
            if part.rank:
                reader = others[part.rank - 1]
                under_way.append((reader, reader.read_pages(baton, part, sources, targets)))
            else:
                own_reader.read_pages(baton, part, sources, targets)
        seconds.append(thread_time() - before)
        told = len(under_way)
        until(partial(all_done, under_way), 10, "the end of all reads")
    lead.end()
    for each in sockets:
        each.close()
    for _ in sockets:
        os.wait()
    os.close(memory)
    return told, seconds


def main() -> None:
    """Write a line for each pair."""
    for prefill, decode in PAIRS:
        told, seconds = posted(prefill, decode)
        least, middle = (1000 * each for each in (min(seconds), median(seconds)))
        sys.stdout.write(f"P {prefill} D {decode}: {told} commands, {least:.2f} ms, median {middle:.2f}\n")


if __name__ == "__main__":
    main()

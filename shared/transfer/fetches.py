"""The life of a fetch: check the peer, read the pages, then the lease word; after a failure, wait for proof of the end.

Knows nothing of NIXL: it drives a `WorkerReader`, whose ranks post one-sided reads and report their state. Every
transfer is this class around readers of its own, so a scheduler sees the same behaviour from all of them.

**Only DONE proves that a read has ended.** Over UCX, bytes were seen to land after a read was released and after the
peer was removed (docs/decisions/0001-nixl-over-ucx.md). So a read that is not done is never released and its peer
never removed. A read that failed, or stays undone for `quarantine_seconds`, costs the reader that made it: new
fetches go to a fresh reader, and the old one is closed once its healthy reads are over. Closing destroys its
endpoints and its threads; nothing lands after that. It is the fence, and it harms no other fetch. A device that copies
on its own outlives a reader: for VRAM closing is followed by `PageAccess.fence`, which waits for the device.

**One lease word proves the pages of all ranks.** A worker of several ranks (GPUs) has one pool of page numbers: a lease
locks a number on all of them, and its word is rank 0's. Each rank here reads its slices from the ranks that have them;
the word is read when the reads of all have ended:

    holder   rank 0   word = nonce ──────────────────────────────── word = 0 ── unlock ── plan a step ── order it
             others        the pages stay as they are, on every rank                                        └ rewrite
    reader   ranks             read … DONE   read … DONE   (all of them)
             rank 0                                         └─► read word == nonce

A rank's bytes can change only by a step that was ordered after the word was cleared. If the word still was the nonce
when it was read, it had not been cleared then, so no such step had been ordered when the last of the reads ended: all
were over the lease's pages as they were leased. It rests on two orders, which each side keeps by itself: the holder
clears before it unlocks, and orders its ranks after that; the reader asks for the word after it *knows* that every
rank's reads have ended. A word for each rank would prove no more, and several words can disagree. A holder that asks
whether a lease lives (`tls`) may answer at one rank a moment later than at another: so where any rank left out bytes,
the fetch is stale whatever the word says.

The first fetch from a peer reads the peer's known page into its own first target page and compares the bytes, each rank
from each of its sources. The pages of the request overwrite it. So the check is one more read of the fetch, under the
fetch's own bounds.

Pages are read in batches. Where the transport copies within the post (shared memory), a long prompt would otherwise
hold up the worker's loop, and with it every stream: when a turn has spent its time on posting, the rest waits for the
next turn. So a healthy fetch may take long. It is late only when its *peer* has been silent for `fetch_seconds_max`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import structlog

from shared.primitives.errors import TransferError
from shared.primitives.state_table import StateName, StateTable
from shared.transfer.counters import KvCounters
from shared.transfer.kv_links import KvLinks
from shared.transfer.memory import PageMemory
from shared.transfer.protocol import FetchEnded, FetchEvent, FetchFailed, FetchLanded, FetchStale
from shared.transfer.rank_reader import Begin, ReadHandle, WorkerReader, make_here
from shared.transfer.reader import ENDED, SPANS_MAX, NotPostedError, ReadState
from shared.transfer.slices import SlicePart, parts_of, ranks_of, refusal
from shared.wire.baton import Baton, Holder

RETIRE_AGAIN_SECONDS = 1.0  # between two attempts to make a reader: all ports may be taken for a while

log = structlog.get_logger(__name__)


# ---- states, as a table: `StateTable` raises for a pair that is not in it --------------------------------------------
#
#     checking_peer ──known──► reading_pages ──done──► reading_word ──held──► landed
#           │                        │                     │    └─────gone──► stale
#           ├────────────────────────┴─────────────────────┤
#           │                                              └──refused──► failed
#           └──read failed, timed out, abandoned──► given_up ──read done, fenced──► ended
#
# `failed` is for a fetch of which nothing is under way: it was refused, or the peer's known page had other bytes. A
# fetch in `given_up` has sent its owner `FetchFailed` (unless the owner abandoned it) and owes one `FetchEnded`. The
# table does not know which reads an event ends.


class FetchState(StateName):
    CHECKING_PEER = "checking_peer"
    READING_PAGES = "reading_pages"
    READING_WORD = "reading_word"
    GIVEN_UP = "given_up"
    LANDED = "landed"
    STALE = "stale"
    FAILED = "failed"
    ENDED = "ended"


class ReadEvent(StateName):
    PEER_KNOWN = "peer_known"  # its known page has the right bytes, or need not be read
    PAGES_DONE = "pages_done"
    WORD_HELD = "word_held"
    WORD_GONE = "word_gone"
    REFUSED = "refused"  # with no read under way
    READ_FAILED = "failed"
    TIMED_OUT = "timed_out"
    ABANDONED = "abandoned"
    READ_DONE = "read_done"  # of a fetch that was given up
    FENCED = "fenced"


_LOST = {
    ReadEvent.REFUSED: FetchState.FAILED,
    ReadEvent.READ_FAILED: FetchState.GIVEN_UP,
    ReadEvent.TIMED_OUT: FetchState.GIVEN_UP,
    ReadEvent.ABANDONED: FetchState.GIVEN_UP,
}

FETCH_STATES = StateTable[FetchState, ReadEvent](
    "fetch",
    {
        FetchState.CHECKING_PEER: {ReadEvent.PEER_KNOWN: FetchState.READING_PAGES, **_LOST},
        FetchState.READING_PAGES: {ReadEvent.PAGES_DONE: FetchState.READING_WORD, **_LOST},
        FetchState.READING_WORD: {
            ReadEvent.WORD_HELD: FetchState.LANDED,
            ReadEvent.WORD_GONE: FetchState.STALE,
            **_LOST,
        },
        FetchState.GIVEN_UP: {
            ReadEvent.READ_FAILED: FetchState.GIVEN_UP,
            ReadEvent.ABANDONED: FetchState.GIVEN_UP,
            ReadEvent.READ_DONE: FetchState.ENDED,
            ReadEvent.FENCED: FetchState.ENDED,
        },
        FetchState.LANDED: {},
        FetchState.STALE: {},
        FetchState.FAILED: {},
        FetchState.ENDED: {},
    },
)


# ---- the life -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Fetch:
    fetch_id: int
    baton: Baton
    into: Sequence[int]
    reader: WorkerReader
    parts: tuple[SlicePart, ...]
    slot: int
    started: float
    posted: float  # when it last got time of a turn
    unread: list[ReadBatch]  # not yet posted, the next one last
    state: FetchState = FETCH_STATES.start
    reads: list[ReadHandle] = field(default_factory=list)  # those posted
    pages_started: float = 0.0  # when the first batch could be posted
    progressed: float = 0.0  # since when its peer is waited for: the last read DONE, or posted with no other
    given_up: float = 0.0
    broken: bool = False  # its read FAILED: only the fence can end it
    wrong: bool = False  # a known page came with other bytes
    left_out: bool = False  # a rank of the holder found the lease ended, and gave no bytes

    @property
    def holder(self) -> Holder:
        return self.baton.holder

    def advance(self, event: ReadEvent) -> None:
        self.state = FETCH_STATES.next(self.state, event)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds of fetching. A fetch without progress is given up; one that stays given up costs the reader."""

    fetches_max: int
    fetch_seconds_max: float  # from one read that is DONE to the next, not for the whole of a fetch
    quarantine_seconds: float
    read_batch_bytes: int = 8 * 2**20  # of one read of pages: a few milliseconds of copying
    # The same of other ranks, which copy on threads of their own: each read of theirs is a command to them.
    rank_batch_bytes: int = 256 * 2**20
    # Stop posting once this much time was spent since the last poll; the batch in hand is still posted.
    post_seconds: float = 0.004


class ReadBatch(NamedTuple):
    """One read of pages: of the holder's `sources`, into the own `targets`."""

    part: SlicePart
    sources: Sequence[int]
    targets: Sequence[int]
    place: int = 0  # of its first page among the fetch's


def read_batches(
    parts: Sequence[SlicePart], sources: Sequence[int], into: Sequence[int], limits: FetchLimits
) -> list[ReadBatch]:
    """All reads of a fetch, the next one last: all parts of some pages, then those of the next ones.

    So all ranks read at the same time. Other ranks' come first, and in larger reads: they copy while rank 0 goes on.
    """
    batches = [batch for part in parts for batch in _batches_of(part, sources, into, limits)]
    if len(batches) > 1:
        batches.sort(key=lambda batch: (batch.place, -batch.part.rank), reverse=True)
    return batches


def _batches_of(
    part: SlicePart, sources: Sequence[int], into: Sequence[int], limits: FetchLimits
) -> Iterator[ReadBatch]:
    most = limits.rank_batch_bytes if part.rank else limits.read_batch_bytes
    count = max(1, min(SPANS_MAX, most // part.size_bytes))
    for start in range(0, len(into), count):
        yield ReadBatch(part, sources[start : start + count], into[start : start + count], start)


class Fetches:
    """The outstanding fetches of one worker: `start`, `abandon` and `poll` of the `Fetcher` protocol."""

    def __init__(
        self,
        own: Holder,
        pages: PageMemory,
        kv_format: str,
        make_reader: Callable[[], WorkerReader],
        limits: FetchLimits,
        clock: Callable[[], float],
        counters: KvCounters,
        begin: Begin = make_here,
    ):
        self._own = own
        self._page_bytes = sum(rank.page_bytes for rank in ranks_of(own))  # of all ranks
        self._kv_format = kv_format
        self._make_reader = make_reader
        self._begin = begin
        self._next: Future[WorkerReader] | None = None  # being made
        self._limits = limits
        self._clock = clock
        self._reader = make_reader()
        self._retiring: WorkerReader | None = None
        self._retire_again_at = -math.inf
        self._fetches: dict[int, _Fetch] = {}
        self._slots = list(range(limits.fetches_max))
        self._events: list[FetchEvent] = []
        self._posting_seconds = 0.0  # since the last poll
        self.kv_links = KvLinks(own, counters)
        self.readers_fenced = 0
        if own.known_page >= 0:
            pages.write_known_bytes(own.known_page)

    @property
    def outstanding(self) -> int:
        """Fetches that have not ended; while above 0, `poll` has work to do."""
        return len(self._fetches)

    def start(self, fetch_id: int, baton: Baton, start_page: int, into: Sequence[int]) -> None:
        """See `Fetcher.start`."""
        assert fetch_id not in self._fetches, f"fetch {fetch_id} was started twice"
        if reason := self._refusal(baton, start_page, into):
            self._events.append(FetchFailed(fetch_id, reason, ended=True))
            return
        now, parts = self._clock(), parts_of(self._own, baton.holder)
        batches = read_batches(parts, baton.pages[start_page : start_page + len(into)], into, self._limits)
        fetch = _Fetch(fetch_id, baton, into, self._reader, parts, self._slots.pop(), now, now, batches)
        self._fetches[fetch_id] = fetch
        self.kv_links.note_use(fetch.holder)
        if into and self.kv_links.needs_check(fetch.holder):
            self._read_known_page(fetch)
        else:
            self._read_pages(fetch)

    def abandon(self, fetch_id: int) -> None:
        """See `Fetcher.abandon`. Nothing happens for a fetch whose last event has been polled."""
        unpolled = len(self._events)
        self._events = [event for event in self._events if event.fetch_id != fetch_id]
        if fetch := self._fetches.get(fetch_id):
            self._give_up(fetch, ReadEvent.ABANDONED)
        elif len(self._events) < unpolled:
            self._events.append(FetchEnded(fetch_id))

    def poll(self) -> list[FetchEvent]:
        """See `Fetcher.poll`."""
        self._posting_seconds = 0.0
        self._reader.look()
        if self._retiring:
            self._retiring.look()
        for fetch in list(self._fetches.values()):
            self._poll_reads(fetch)
        self._share_turn()
        if self.outstanding or self._retiring:
            self._fence()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Fence everything: what is outstanding ends."""
        self._reader.close()
        if self._retiring:
            self._retiring.close()
        if self._next and self._next.exception() is None:
            self._next.result().close()

    # ---- before the first read ---------------------------------------------------------------------------------

    def _refusal(self, baton: Baton, start_page: int, into: Sequence[int]) -> str:
        holder = baton.holder
        if baton.kv_format != self._kv_format:
            return f"KV format {baton.kv_format!r} of {holder.name} is not this worker's {self._kv_format!r}"
        if reason := refusal(self._own, holder):
            return reason
        if start_page + len(into) > len(baton.pages):
            return f"the baton has {len(baton.pages)} pages, fewer than {start_page + len(into)}"
        if not self._slots:
            return f"{self._limits.fetches_max} fetches are outstanding"
        given_up = [fetch for fetch in self._fetches.values() if self._may_never_end(fetch)]
        if any(fetch.holder.name == holder.name for fetch in given_up):
            return f"a read from {holder.name} has not ended yet"
        return self.kv_links.refusal(holder)

    def _read_known_page(self, fetch: _Fetch) -> None:
        """Read it into the first target page: nothing else uses that page before the fetch has ended."""
        for part in fetch.parts:
            self._post(fetch, partial(fetch.reader.read_known_page, fetch.baton, part, fetch.into[0]))
            if fetch.state is not FetchState.CHECKING_PEER:
                return
        self._poll_reads(fetch)  # where the transport copies within the post, the page is there already

    def _check_known_page(self, fetch: _Fetch) -> None:
        holder = fetch.holder
        self.kv_links.note_check(holder, fetch.reader.new_transport(), right_bytes=not fetch.wrong)
        if reason := self.kv_links.refusal(holder):
            self._refuse(fetch, reason)
        else:
            self._read_pages(fetch)

    # ---- reading -----------------------------------------------------------------------------------------------

    def _read_pages(self, fetch: _Fetch) -> None:
        fetch.advance(ReadEvent.PEER_KNOWN)
        fetch.pages_started = self._clock()
        if fetch.unread:
            self._post_batches(fetch)
        else:
            self._read_word(fetch)

    def _share_turn(self) -> None:
        """A batch of the fetch that has waited longest, so that none starves; then the oldest fetch first."""
        waiting = [
            fetch
            for fetch in self._fetches.values()
            if fetch.unread and fetch.state is FetchState.READING_PAGES
        ]
        if waiting:
            self._read_next_batch(min(waiting, key=lambda fetch: fetch.posted))
        for fetch in waiting:
            self._post_batches(fetch)

    def _post_batches(self, fetch: _Fetch) -> None:
        """Post what this turn has time for."""
        while fetch.unread and self._posting_seconds < self._limits.post_seconds:
            self._read_next_batch(fetch)

    def _read_next_batch(self, fetch: _Fetch) -> None:
        batch = fetch.unread.pop()
        self._post(
            fetch, partial(fetch.reader.read_pages, fetch.baton, batch.part, batch.sources, batch.targets)
        )
        if fetch.unread and fetch.reader.state(fetch.reads[-1]) is ReadState.FAILED:
            fetch.unread.clear()  # its peer is asked for nothing more; the next poll gives it up

    def _read_word(self, fetch: _Fetch) -> None:
        fetch.advance(ReadEvent.PAGES_DONE)
        self._post(fetch, partial(fetch.reader.read_word, fetch.baton, fetch.slot))

    def _post(self, fetch: _Fetch, post: Callable[[], ReadHandle]) -> None:
        fetch.posted = self._clock()
        if not fetch.reads:
            fetch.progressed = fetch.posted
        try:
            fetch.reads.append(post())
        except NotPostedError as error:
            self._not_posted(fetch, str(error))
        finally:
            self._posting_seconds += self._clock() - fetch.posted

    def _not_posted(self, fetch: _Fetch, reason: str) -> None:
        """This read asked for nothing; reads posted before it may still land."""
        fetch.unread.clear()
        if fetch.reads:
            self._give_up(fetch, ReadEvent.READ_FAILED, reason)
        else:
            self._refuse(fetch, reason)

    def _poll_reads(self, fetch: _Fetch) -> None:
        if fetch.broken:
            return
        states = {handle: fetch.reader.state(handle) for handle in fetch.reads}
        for handle, state in states.items():
            if state in ENDED:
                fetch.reader.release(handle)
                fetch.reads.remove(handle)
                fetch.progressed = self._clock()
                fetch.wrong |= state is ReadState.WRONG
                fetch.left_out |= state is ReadState.GONE
        if ReadState.FAILED in states.values():
            fetch.broken = True
            self._give_up(fetch, ReadEvent.READ_FAILED)
        elif ReadState.REFUSED in states.values() and fetch.state is not FetchState.GIVEN_UP:
            self._not_posted(fetch, f"another rank of this worker cannot read {fetch.holder.name}")
        elif not fetch.reads:
            self._reads_done(fetch)
        elif fetch.state is not FetchState.GIVEN_UP and self._late(fetch):
            self._give_up(fetch, ReadEvent.TIMED_OUT)

    def _reads_done(self, fetch: _Fetch) -> None:
        if fetch.state is FetchState.GIVEN_UP:
            self._end(fetch, ReadEvent.READ_DONE)
        elif fetch.state is FetchState.CHECKING_PEER:
            self._check_known_page(fetch)
        elif fetch.state is FetchState.READING_WORD:
            self._check_lease_word(fetch)
        elif not fetch.unread:
            seconds = self._clock() - fetch.pages_started
            self.kv_links.note_fetch(fetch.holder, self._bytes_of(fetch), seconds)
            self._read_word(fetch)
            if fetch.reads:
                self._poll_reads(fetch)  # over CMA the word is there already: a poll less to wait for

    # ---- the end of a fetch ------------------------------------------------------------------------------------

    def _check_lease_word(self, fetch: _Fetch) -> None:
        held = fetch.reader.word(fetch.slot) == fetch.baton.nonce and not fetch.left_out
        fetch.advance(ReadEvent.WORD_HELD if held else ReadEvent.WORD_GONE)
        self._forget(fetch)
        if not held:
            self._events.append(FetchStale(fetch.fetch_id))
            return
        fetch.reader.settle()
        seconds = max(self._clock() - fetch.started, 1e-9)
        link = self.kv_links.link(fetch.holder)
        self._events.append(FetchLanded(fetch.fetch_id, self._bytes_of(fetch), seconds, link))

    def _bytes_of(self, fetch: _Fetch) -> int:
        return len(fetch.into) * self._page_bytes

    def _refuse(self, fetch: _Fetch, reason: str) -> None:
        """Nothing of it is under way."""
        fetch.advance(ReadEvent.REFUSED)
        self._forget(fetch)
        self._events.append(FetchFailed(fetch.fetch_id, reason, ended=True))

    def _give_up(self, fetch: _Fetch, event: ReadEvent, reason: str = "") -> None:
        already = fetch.state is FetchState.GIVEN_UP
        fetch.advance(event)
        if already:
            return
        fetch.unread.clear()
        fetch.given_up = self._clock()
        if event is not ReadEvent.ABANDONED:
            reason = reason or f"the read from {fetch.holder.name} {event.value.replace('_', ' ')}"
            self._events.append(FetchFailed(fetch.fetch_id, reason, ended=False))

    def _end(self, fetch: _Fetch, event: ReadEvent) -> None:
        fetch.advance(event)
        self._forget(fetch)
        self._events.append(FetchEnded(fetch.fetch_id))

    def _forget(self, fetch: _Fetch) -> None:
        del self._fetches[fetch.fetch_id]
        self._slots.append(fetch.slot)

    # ---- the fence ---------------------------------------------------------------------------------------------

    def _fence(self) -> None:
        if self._retiring is None and any(self._overdue(fetch) for fetch in self._fetches.values()):
            self._retire_reader()
        retiring = self._retiring
        if retiring is None:
            return
        left = [fetch for fetch in self._fetches.values() if fetch.reader is retiring]
        if all(fetch.state is FetchState.GIVEN_UP for fetch in left):
            retiring.close()
            self._retiring = None
            self.readers_fenced += 1
            log.warning("transfer.reader_fenced", peers=sorted({fetch.holder.name for fetch in left}))
            for fetch in left:
                self._end(fetch, ReadEvent.FENCED)

    def _retire_reader(self) -> None:
        """Let a new reader take its place; where none can be had now, try again later: nothing is lost meanwhile."""
        if self._clock() < self._retire_again_at:
            return
        self._next = self._next or self._begin(self._make_reader)
        if not self._next.done():
            return
        made, self._next = self._next, None
        try:
            self._retiring, self._reader = self._reader, made.result()
        except TransferError as error:
            self._retire_again_at = self._clock() + RETIRE_AGAIN_SECONDS
            log.warning("transfer.no_reader", reason=str(error))

    def _may_never_end(self, fetch: _Fetch) -> bool:
        """True if this read may never finish, so its peer must not get new reads. A cancelled but healthy read
        does not count: cancellations would otherwise block the peer for everyone."""
        return fetch.state is FetchState.GIVEN_UP and (fetch.broken or self._late(fetch))

    def _late(self, fetch: _Fetch) -> bool:
        """Whether its peer is silent. A fetch with nothing posted waits for this worker, and does not age."""
        silent_seconds = self._clock() - fetch.progressed
        return bool(fetch.reads) and silent_seconds >= self._limits.fetch_seconds_max

    def _overdue(self, fetch: _Fetch) -> bool:
        if fetch.state is not FetchState.GIVEN_UP or fetch.reader is not self._reader:
            return False
        return fetch.broken or self._clock() - fetch.given_up >= self._limits.quarantine_seconds

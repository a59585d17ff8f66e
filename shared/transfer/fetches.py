"""The life of a fetch: read the pages, then the lease word; and, when that goes wrong, find out when it has ended.

Knows nothing of NIXL: it drives a `Reader`, which posts one-sided reads and tells how they stand. Both transfers
(`nixl`, `in_process`) are this class around a reader of their own, so what a scheduler sees is the same.

**Only DONE proves that a read has ended.** Over UCX, bytes were seen to land after a read was released and after the
peer was removed (docs/decisions/0001-nixl-over-ucx.md). So a read that is not done is never released and its peer never
removed. A read that failed, or stays undone for `fence_seconds`, costs the reader that made it: new fetches go
to a fresh reader, the old one lives until its healthy reads are over, and is then closed. Closing destroys its
endpoints and its threads; nothing lands after that. It is the fence, and it harms no other fetch.

Pages are read in portions. Where the transport copies within the post (shared memory), a long prompt would else hold
up the worker's loop, and with it every stream: when a turn has spent its time on posting, the rest waits for the next.
So a fetch may take long in good health: it is late when its *peer* has been silent for too long, not when it is big.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from shared.baton import Baton, Holder
from shared.transfer.fetch_states import FetchState, ReadEvent, advance
from shared.transfer.link_speed import LinkProbe
from shared.transfer.memory import PageMemory
from shared.transfer.protocol import FetchEnded, FetchEvent, FetchFailed, FetchLanded, FetchStale
from shared.transfer.reader import NotPostedError, Reader, ReadState, Span, page_spans, peer_name


class ReadNotice(msgspec.Struct, frozen=True, array_like=True):
    """The notification that rides on the read of a lease word: who has read what."""

    lease: int
    nonce: int
    rid: str
    attempt: int
    uid: str
    epoch: int


@dataclass(slots=True)
class _Fetch:
    fetch_id: int
    baton: Baton
    peer: str
    reader: Reader
    slot: int
    started: float
    posted: float  # when it last got time of a turn
    fetched_bytes: int
    unread: list[list[Span]]  # portions not yet posted, the next one last
    state: FetchState = FetchState.READING_PAGES
    reads: list[int] = field(default_factory=list)  # handles of those posted
    progressed: float = 0.0  # since when its peer is waited for: the last read DONE, or posted with no other
    given_up: float = 0.0
    broken: bool = False  # its read FAILED: only the fence can end it


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds of fetching. A fetch without progress is given up; one given up too long costs the reader."""

    fetches_max: int = 1024
    fetch_seconds_max: float = 10.0  # from one portion to the next, not for the whole of a fetch
    fence_seconds: float = 5.0
    portion_bytes: int = 8 * 2**20  # of a read of pages: a few milliseconds of copying
    post_seconds: float = 0.004  # spent on posting between two polls, and the portion that passes it


class Fetches:
    """The outstanding fetches of one worker: `start`, `abandon` and `poll` of the `Fetcher` protocol."""

    def __init__(
        self,
        holder: Holder,
        pages: PageMemory,
        kv_format: str,
        make_reader: Callable[[], Reader],
        limits: FetchLimits,
        clock: Callable[[], float],
    ):
        self._holder = holder
        self._pages = pages
        self._kv_format = kv_format
        self._make_reader = make_reader
        self._limits = limits
        self._clock = clock
        self._reader = make_reader()
        self._retiring: Reader | None = None
        self._fetches: dict[int, _Fetch] = {}
        self._slots = list(range(limits.fetches_max))
        self._events: list[FetchLanded | FetchStale | FetchFailed | FetchEnded] = []
        self._posting_seconds = 0.0  # since the last poll
        self.link_probe = LinkProbe(holder, pages, clock)
        self.readers_fenced = 0

    @property
    def outstanding(self) -> int:
        """Fetches that have not ended, and a probe; while above 0, `poll` has work to do."""
        return len(self._fetches) + self.link_probe.under_way

    def start(self, fetch_id: int, baton: Baton, start_page: int, into: Sequence[int]) -> None:
        """See `Fetcher.start`."""
        assert fetch_id not in self._fetches, f"fetch {fetch_id} was started twice"
        now = self._clock()
        reason = self._refusal(baton, start_page, into)
        if reason := reason or self.link_probe.meet(baton.holder, self._reader):
            self._events.append(FetchFailed(fetch_id, reason, ended=True))
            return
        fetch = _Fetch(
            fetch_id,
            baton,
            peer_name(baton.holder),
            self._reader,
            self._slots.pop(),
            now,
            now,
            len(into) * self._pages.page_bytes,
            self._portions(baton, start_page, into),
        )
        self._fetches[fetch_id] = fetch
        if fetch.unread:
            self._read_on(fetch)
        else:
            self._read_word(fetch)

    def abandon(self, fetch_id: int) -> None:
        """See `Fetcher.abandon`. Nothing happens for a fetch whose last event has been polled."""
        unpolled = len(self._events)
        self._events = [event for event in self._events if event.fetch_id != fetch_id]
        if fetch := self._fetches.get(fetch_id):
            self._give_up(fetch, ReadEvent.ABANDONED)
        elif len(self._events) < unpolled:
            self._events.append(FetchEnded(fetch_id))

    def poll(self) -> list[FetchEvent]:
        """See `Fetcher.poll`; `Collected` is told by the transfer around this."""
        self._posting_seconds = 0.0
        self.link_probe.poll()
        for fetch in list(self._fetches.values()):
            self._move_on(fetch)
        self._share_turn()
        if self.outstanding or self._retiring:
            self._fence()
        events: list[FetchEvent] = [*self._events]
        self._events.clear()
        return events

    def close(self) -> None:
        """Fence everything: what is outstanding ends."""
        self._reader.close()
        if self._retiring:
            self._retiring.close()

    # ---- one fetch ---------------------------------------------------------------------------------------------

    def _refusal(self, baton: Baton, start_page: int, into: Sequence[int]) -> str:
        peer = peer_name(baton.holder)
        if baton.kv_format != self._kv_format:
            return f"KV format {baton.kv_format!r} of {peer} is not this worker's {self._kv_format!r}"
        if baton.holder.page_bytes != self._pages.page_bytes:
            return (
                f"{peer} has pages of {baton.holder.page_bytes} bytes, this worker {self._pages.page_bytes}"
            )
        if start_page + len(into) > len(baton.pages):
            return f"the baton has {len(baton.pages)} pages, fewer than {start_page + len(into)}"
        if not self._slots:
            return f"{self._limits.fetches_max} fetches are outstanding"
        if any(fetch.peer == peer and self._doubtful(fetch) for fetch in self._fetches.values()):
            return f"a read from {peer} has not ended yet"
        return ""

    def _portions(self, baton: Baton, start_page: int, into: Sequence[int]) -> list[list[Span]]:
        count = max(1, self._limits.portion_bytes // self._pages.page_bytes)
        starts = reversed(range(0, len(into), count))
        return [
            page_spans(baton, start_page + start, into[start : start + count], self._pages)
            for start in starts
        ]

    def _share_turn(self) -> None:
        """A portion of the fetch that has waited longest, so that none starves; then the oldest fetch first."""
        waiting = [fetch for fetch in self._fetches.values() if fetch.unread]
        if waiting:
            self._read_portion(min(waiting, key=lambda fetch: fetch.posted))
        for fetch in waiting:
            self._read_on(fetch)

    def _read_on(self, fetch: _Fetch) -> None:
        """Post what this turn has time for."""
        while fetch.unread and self._posting_seconds < self._limits.post_seconds:
            self._read_portion(fetch)

    def _read_portion(self, fetch: _Fetch) -> None:
        spans = fetch.unread.pop()
        self._post(fetch, partial(fetch.reader.read_pages, fetch.baton.holder, spans))
        if fetch.unread and fetch.reader.state(fetch.reads[-1]) is ReadState.FAILED:
            fetch.unread.clear()  # its peer is asked for nothing more; the next poll gives it up

    def _post(self, fetch: _Fetch, post: Callable[[], int]) -> None:
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
        """Nothing of it was asked for; portions before it may still be landing."""
        fetch.unread.clear()
        if fetch.reads:
            self._give_up(fetch, ReadEvent.FAILED, reason)
        else:
            self._forget(fetch)
            self._events.append(FetchFailed(fetch.fetch_id, reason, ended=True))

    def _read_word(self, fetch: _Fetch) -> None:
        fetch.state = advance(fetch.state, ReadEvent.PAGES_DONE)
        baton = fetch.baton
        uid, epoch = self._holder.uid, self._holder.epoch
        note = ReadNotice(baton.lease, baton.nonce, baton.rid, baton.attempt, uid, epoch)
        payload = msgspec.msgpack.encode(note)
        self._post(fetch, lambda: fetch.reader.read_word(baton.holder, baton.lease, fetch.slot, payload))

    def _move_on(self, fetch: _Fetch) -> None:
        if fetch.broken:
            return
        states = {handle: fetch.reader.state(handle) for handle in fetch.reads}
        for handle, state in states.items():
            if state is ReadState.DONE:
                fetch.reader.release(handle)
                fetch.reads.remove(handle)
                fetch.progressed = self._clock()
        if ReadState.FAILED in states.values():
            fetch.broken = True
            self._give_up(fetch, ReadEvent.FAILED)
        elif not fetch.reads:
            self._go_on(fetch)
        elif fetch.state is not FetchState.GIVEN_UP and self._late(fetch):
            self._give_up(fetch, ReadEvent.TIMED_OUT)

    def _go_on(self, fetch: _Fetch) -> None:
        if fetch.state is FetchState.GIVEN_UP:
            self._end(fetch, ReadEvent.READ_DONE)
        elif fetch.state is FetchState.READING_WORD:
            self._judge(fetch)
        elif not fetch.unread:
            self._read_word(fetch)
            if fetch.reads:
                self._move_on(fetch)  # over CMA the word is there already: a poll less to wait for

    def _late(self, fetch: _Fetch) -> bool:
        """Whether its peer is silent. A fetch with nothing posted waits for this worker, and does not age."""
        silent_seconds = self._clock() - fetch.progressed
        return bool(fetch.reads) and silent_seconds >= self._limits.fetch_seconds_max

    def _judge(self, fetch: _Fetch) -> None:
        held = fetch.reader.word(fetch.slot) == fetch.baton.nonce
        fetch.state = advance(fetch.state, ReadEvent.WORD_HELD if held else ReadEvent.WORD_GONE)
        self._forget(fetch)
        if not held:
            self._events.append(FetchStale(fetch.fetch_id))
            return
        seconds = max(self._clock() - fetch.started, 1e-9)
        self.link_probe.poll()  # a probe of this link was posted earlier, and is done as well
        link = self.link_probe.links.get(fetch.peer)
        self._events.append(FetchLanded(fetch.fetch_id, fetch.fetched_bytes, seconds, link))

    def _give_up(self, fetch: _Fetch, event: ReadEvent, reason: str = "") -> None:
        already = fetch.state is FetchState.GIVEN_UP
        fetch.state = advance(fetch.state, event)
        if already:
            return
        fetch.unread.clear()
        fetch.given_up = self._clock()
        if event is not ReadEvent.ABANDONED:
            reason = reason or f"the read from {fetch.peer} {event.value.replace('_', ' ')}"
            self._events.append(FetchFailed(fetch.fetch_id, reason, ended=False))

    def _end(self, fetch: _Fetch, event: ReadEvent) -> None:
        fetch.state = advance(fetch.state, event)
        self._forget(fetch)
        self._events.append(FetchEnded(fetch.fetch_id))

    def _forget(self, fetch: _Fetch) -> None:
        del self._fetches[fetch.fetch_id]
        self._slots.append(fetch.slot)

    # ---- the fence ---------------------------------------------------------------------------------------------

    def _fence(self) -> None:
        overdue = any(self._overdue(fetch) for fetch in self._fetches.values())
        if self._retiring is None and (overdue or self.link_probe.broken(self._reader)):
            self._retiring, self._reader = self._reader, self._make_reader()
        retiring = self._retiring
        if retiring is None:
            return
        left = [fetch for fetch in self._fetches.values() if fetch.reader is retiring]
        if all(fetch.state is FetchState.GIVEN_UP for fetch in left):
            retiring.close()
            self.link_probe.forget(retiring)
            self._retiring = None
            self.readers_fenced += 1
            for fetch in left:
                self._end(fetch, ReadEvent.FENCED)

    def _doubtful(self, fetch: _Fetch) -> bool:
        """Whether the read may never end. One that was abandoned in good health speaks against nobody yet:
        else each client that leaves would cost others that fetch from the same peer an attempt."""
        return fetch.state is FetchState.GIVEN_UP and (fetch.broken or self._late(fetch))

    def _overdue(self, fetch: _Fetch) -> bool:
        if fetch.state is not FetchState.GIVEN_UP or fetch.reader is not self._reader:
            return False
        return fetch.broken or self._clock() - fetch.given_up >= self._limits.fence_seconds

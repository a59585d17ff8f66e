"""Requests whose KV is on its way here: from the `Decode` command to the moment they may join a batch.

    Decode ─► waiting (nothing held) ─► ARRIVING (pages taken, fetch started)
                                        ├─ Landed ─► joins the next batch, always
                                        ├─ Stale  ─► Refused(stale), pages free
                                        ├─ Failed ─► Refused(unreachable), pages quarantined until Ended
                                        └─ Cancel ─► fetch abandoned, pages quarantined until Ended

Only DONE proves that a read has ended, so a page that an unproven read may still write to belongs to nobody. What
the radix cache of this worker holds already is not fetched; if it holds everything, there is no fetch at all. Of
requests that come together with one prefix the first fetches it, and the others wait until it is in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decode.counters import DecodeCounters
from shared.baton import Baton
from shared.effects import AbandonFetch, Effect, StartFetch
from shared.errors import InvariantError
from shared.kv.kv_memory import KvMemory
from shared.kv.page_pool import PageState
from shared.messages import Joined
from shared.req import Req
from shared.transfer.protocol import FetchEnded, FetchFailed, FetchLanded, FetchOutcome, FetchStale, KvLink


@dataclass(frozen=True, slots=True)
class Transferred:
    """The request's pages are its own and valid."""

    req: Req
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0
    link: KvLink | None = None  # over which they came, if it has been measured

    @property
    def joined(self) -> Joined:
        """What the router hears of it."""
        req, link = self.req, self.link or KvLink("", 0.0)
        return Joined(
            req.rid,
            req.attempt,
            self.fetched_bytes,
            req.cached_len,
            self.fetch_seconds,
            link.transport,
            link.bytes_per_second,
        )


@dataclass(frozen=True, slots=True)
class NotTransferred:
    """The request holds nothing here any more; `stale` tells a lease that ended from a fetch that failed."""

    req: Req
    stale: bool
    detail: str


@dataclass(slots=True)
class TransferQueue:
    """The fetches in flight, and the pages of those that were never proven to have ended."""

    memory: KvMemory
    counters: DecodeCounters
    effects: list[Effect]
    _fetching: dict[int, Req] = field(default_factory=dict)
    _waiting: list[tuple[Req, Baton, Req]] = field(default_factory=list)  # the last is whom it waits for
    _quarantined: dict[int, list[int]] = field(default_factory=dict)  # pages by fetch
    _next_fetch_id: int = 1

    @property
    def requests(self) -> list[Req]:
        """Requests that are arriving, oldest first."""
        return list(self._fetching.values())

    @property
    def waiting(self) -> int:
        """Requests that wait for a prefix."""
        return len(self._waiting)

    @property
    def in_flight(self) -> bool:
        """Whether the fetcher has anything to tell."""
        return bool(self._fetching or self._quarantined)

    def wait(self, req: Req, baton: Baton) -> bool:
        """Let the request wait if another one is fetching the next page that it would fetch. It holds nothing."""
        _, cached = self.memory.cache.probe(req.token_ids[: baton.kv_len], req.extra_key)
        end = cached + self.memory.page_size
        if end > baton.kv_len:
            return False
        wanted = req.token_ids[:end]
        for other in self._fetching.values():
            same = other.extra_key == req.extra_key and other.token_ids[:end] == wanted
            if same and end < len(other.token_ids):
                self._waiting.append((req, baton, other))
                self.counters.waited_for_prefix += 1
                return True
        return False

    def take_waiting(self) -> list[tuple[Req, Baton, bool]]:
        """Those whose awaited fetch has ended, in the order they came, and whether it landed."""
        fetching = self.requests
        ready = [
            (req, baton, other.kv_len > 0) for req, baton, other in self._waiting if other not in fetching
        ]
        self._waiting = [entry for entry in self._waiting if entry[2] in fetching]
        return ready

    def start(self, req: Req, baton: Baton) -> Transferred | None:
        """Fetch what is not cached here into fresh pages; `Transferred` at once when nothing is missing.

        The request is matched and locked already, and the caller has made sure that the pages are free.
        """
        start_page = len(req.pages)
        missing = self.memory.pages_for(baton.kv_len) - start_page
        if missing == 0:
            self.counters.full_hits += 1
            return self._arrive(Transferred(req))
        into = self.memory.allocate(req, missing, PageState.ARRIVING)
        assert into is not None
        fetch_id = self._next_fetch_id
        self._next_fetch_id += 1
        self._fetching[fetch_id] = req
        self.effects.append(StartFetch(fetch_id, baton, start_page, tuple(into)))
        return None

    def on_fetch(self, event: FetchOutcome) -> Transferred | NotTransferred | None:
        """What a fetch event means for its request; None if the request is gone already."""
        req = self._fetching.pop(event.fetch_id, None)
        if req is None:
            self._on_given_up(event)
            return None
        match event:
            case FetchLanded(_, fetched_bytes, seconds, link):
                self.memory.pool.move(req.owned, PageState.ARRIVING, PageState.OWNED)
                return self._arrive(Transferred(req, fetched_bytes, seconds, link))
            case FetchStale():
                self.counters.stale += 1
                self.memory.release(req, PageState.ARRIVING)
                return NotTransferred(req, stale=True, detail="the lease ended before the pages were read")
            case FetchFailed(fetch_id, reason, ended):
                self.counters.unreachable += 1
                self._give_up(fetch_id, req, ended)
                return NotTransferred(req, stale=False, detail=reason)
            case FetchEnded(fetch_id):
                raise InvariantError(f"fetch {fetch_id} of request {req.rid} ended, but nobody gave it up")

    def _on_given_up(self, event: FetchOutcome) -> None:
        """News of a fetch that was given up, perhaps in this very turn: all but one kind prove that it has ended."""
        if isinstance(event, FetchFailed) and not event.ended:
            return
        pages = self._quarantined.pop(event.fetch_id)
        self.memory.pool.retire(pages, PageState.QUARANTINED, after_step=0)

    def abandon(self, req: Req) -> bool:
        """Stop waiting for the request's pages. False: it is not arriving."""
        for entry in self._waiting:
            if entry[0] is req:
                self._waiting.remove(entry)
                return True
        for fetch_id, arriving in self._fetching.items():
            if arriving is req:
                del self._fetching[fetch_id]
                self.effects.append(AbandonFetch(fetch_id))
                self._give_up(fetch_id, req, ended=False)
                return True
        return False

    def _give_up(self, fetch_id: int, req: Req, ended: bool) -> None:
        if not ended:
            self.counters.quarantines += 1
            self.memory.pool.move(req.owned, PageState.ARRIVING, PageState.QUARANTINED)
            self._quarantined[fetch_id] = req.owned
            req.owned = []
        self.memory.release(req, PageState.ARRIVING)

    def _arrive(self, arrived: Transferred) -> Transferred:
        req = arrived.req
        req.kv_len = req.launched_len = len(req.token_ids) - 1
        self.memory.commit_and_dedupe(req)
        self.counters.joined += 1
        self.counters.fetched_bytes += arrived.fetched_bytes
        self.counters.cached_tokens += req.cached_len
        return arrived

"""Requests whose KV is on its way here: from the `Decode` command to the moment they may join a batch.

    Decode ─► waiting (nothing held) ─► transferring (pages are ARRIVING)
                                        ├─ landed    ─► joins the next batch, always
                                        ├─ stale     ─► Refused(stale), pages free
                                        ├─ failed    ─► Refused(unreachable), pages quarantined until FetchEnded
                                        └─ cancelled ─► fetch abandoned, pages quarantined until FetchEnded

Only DONE proves that a read has ended, so a page that an unproven read may still write to is quarantined. What this
worker's radix cache holds already is not fetched; if it holds everything, there is no fetch at all. Of requests that
come together with one prefix the first fetches it, and the others wait until it is in the cache.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from decode.counters import DecodeCounters
from decode.lifecycle import DecodeEvent, DecodeState
from decode.link_rate import LinkRate
from shared.batch.effects import AbandonFetch, StartFetch, WorkerEffect
from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.kv.page_pool import PageState
from shared.primitives.errors import InvariantError
from shared.scheduling.request_states import RequestStates
from shared.transfer.protocol import FetchEnded, FetchEvent, FetchFailed, FetchLanded, FetchStale, KvLink
from shared.wire.baton import Baton
from shared.wire.messages import Joined, RefusalReason


@dataclass(frozen=True, slots=True)
class Transferred:
    """The request's pages are its own and valid."""

    req: Req
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0
    link: KvLink | None = None  # over which they came, if it has been measured

    @property
    def joined(self) -> Joined:
        """The message for the router."""
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
    """The request holds no pages any more: the lease had ended (stale) or the fetch failed (unreachable)."""

    req: Req
    event: DecodeEvent
    reason: RefusalReason
    detail: str


@dataclass(slots=True)
class TransferQueue:
    """Requests that wait or transfer, and the pages of fetches that were never proven to have ended."""

    memory: KvMemory
    states: RequestStates[DecodeState, DecodeEvent]
    counters: DecodeCounters
    effects: list[WorkerEffect]
    link_rate: LinkRate = field(default_factory=LinkRate)
    _transferring: dict[int, Req] = field(default_factory=dict)  # by fetch
    _waiting: list[tuple[Req, Baton, Req]] = field(default_factory=list)  # the last fetches what it waits for
    _quarantined: dict[int, list[int]] = field(default_factory=dict)  # pages by fetch
    _cached: Counter[int] = field(
        default_factory=Counter
    )  # cached pages that transferring requests hold, how often
    _next_fetch_id: int = 1

    @property
    def transferring(self) -> list[Req]:
        """Requests whose pages are being fetched, oldest first."""
        return list(self._transferring.values())

    @property
    def waiting(self) -> list[Req]:
        """Requests that wait for a prefix, oldest first."""
        return [req for req, _, _ in self._waiting]

    @property
    def in_flight(self) -> bool:
        """Whether the fetcher will report."""
        return bool(self._transferring or self._quarantined)

    def pages_held_with(self, req: Req) -> int:
        """Pages that transferring requests and `req` hold, arriving ones and cached ones; a shared one counts once."""
        own = sum(page not in self._cached for page in req.pages)
        return self.memory.pool.count(PageState.ARRIVING) + len(self._cached) + own

    def wait(self, req: Req, baton: Baton) -> bool:
        """Let the request wait if another one is fetching the next page that it would fetch. It holds nothing."""
        _, cached = self.memory.cache.probe(req.token_ids[: baton.kv_len], req.extra_key)
        end = cached + self.memory.page_size
        if end > baton.kv_len:
            return False
        for other in self._transferring.values():
            if end < len(other.token_ids) and req.begins_like(other, cached, end):
                self._waiting.append((req, baton, other))
                self.counters.waited_for_prefix += 1
                return True
        return False

    def take_waiting(self) -> list[tuple[Req, Baton, bool]]:
        """The requests whose awaited fetch has ended, in the order they came, and whether it landed."""
        if not self._waiting:
            return []  # as nearly always
        fetching = self.transferring
        ready = [
            (req, baton, other.kv_len > 0) for req, baton, other in self._waiting if other not in fetching
        ]
        self._waiting = [entry for entry in self._waiting if entry[2] in fetching]
        return ready

    def start(self, req: Req, baton: Baton, now: float) -> Transferred | None:
        """Fetch what is not cached here into fresh pages; `Transferred` at once when nothing is missing.

        The request is matched and locked already, and the caller has made sure that the pages are free.
        """
        start_page = len(req.pages)
        missing = self.memory.pages_for(baton.kv_len) - start_page
        if missing == 0:
            self.counters.full_hits += 1
            return self._arrive(Transferred(req), DecodeEvent.ALL_CACHED)
        self._cached.update(req.pages)
        into = self.memory.allocate(req, missing, PageState.ARRIVING)
        assert into is not None
        fetch_id = self._next_fetch_id
        self._next_fetch_id += 1
        self._transferring[fetch_id] = req
        self.link_rate.started(now)
        self.states.advance(req, DecodeEvent.FETCH_STARTED)
        self.effects.append(StartFetch(fetch_id, baton, start_page, tuple(into)))
        return None

    def on_fetch(self, event: FetchEvent, now: float) -> Transferred | NotTransferred | None:
        """What a fetch event means for its request; None if the request is gone already."""
        req = self._remove(event.fetch_id)
        if req is None:
            self._on_abandoned(event)
            return None
        pages = len(req.owned) if isinstance(event, FetchLanded) else 0
        self.link_rate.landed(pages, now, more=bool(self._transferring))
        match event:
            case FetchLanded(_, fetched_bytes, seconds, link):
                self.memory.pool.move(req.owned, PageState.ARRIVING, PageState.OWNED)
                return self._arrive(Transferred(req, fetched_bytes, seconds, link), DecodeEvent.LANDED)
            case FetchStale():
                self.counters.stale += 1
                self.memory.release(req, PageState.ARRIVING)
                detail = "the lease ended before the pages were read"
                return NotTransferred(req, DecodeEvent.STALE, "stale", detail)
            case FetchFailed(fetch_id, reason, ended):
                self.counters.unreachable += 1
                self._release_pages(fetch_id, req, ended)
                return NotTransferred(req, DecodeEvent.FETCH_FAILED, "unreachable", reason)
            case FetchEnded(fetch_id):
                raise InvariantError(f"fetch {fetch_id} of request {req.rid} ended, but it was not given up")

    def _remove(self, fetch_id: int) -> Req | None:
        """The request of a fetch, which is not transferring any more; None if it was abandoned before."""
        req = self._transferring.pop(fetch_id, None)
        if req is not None:
            for page in req.pages[: len(req.pages) - len(req.owned)]:
                self._cached[page] -= 1
                if not self._cached[page]:
                    del self._cached[page]
        return req

    def _on_abandoned(self, event: FetchEvent) -> None:
        """Free the pages of an abandoned fetch if the event proves its end: all do but a failure that has not ended."""
        if isinstance(event, FetchFailed) and not event.ended:
            return
        pages = self._quarantined.pop(event.fetch_id)
        self.memory.pool.retire(pages, PageState.QUARANTINED, after_step=0)

    def stop_waiting(self, req: Req) -> None:
        """The waiting request has ended."""
        self._waiting = [entry for entry in self._waiting if entry[0] is not req]

    def abandon(self, req: Req) -> None:
        """The transferring request has ended: its pages are quarantined until its fetch has."""
        fetch_id = next(number for number, other in self._transferring.items() if other is req)
        self._remove(fetch_id)
        if not self._transferring:
            self.link_rate.stopped()
        self.effects.append(AbandonFetch(fetch_id))
        self._release_pages(fetch_id, req, ended=False)

    def _release_pages(self, fetch_id: int, req: Req, ended: bool) -> None:
        """Release the pages of a request; those that a fetch may still write to are quarantined."""
        if not ended:
            self.counters.quarantines += 1
            self.memory.pool.move(req.owned, PageState.ARRIVING, PageState.QUARANTINED)
            self._quarantined[fetch_id] = req.owned
            req.owned = []
        self.memory.release(req, PageState.ARRIVING)

    def _arrive(self, arrived: Transferred, event: DecodeEvent) -> Transferred:
        req = arrived.req
        self.states.advance(req, event)
        req.kv_len = req.launched_len = len(req.token_ids) - 1
        self.memory.commit_and_dedupe(req)
        self.counters.joined += 1
        self.counters.fetched_bytes += arrived.fetched_bytes
        self.counters.cached_tokens += req.cached_len
        return arrived

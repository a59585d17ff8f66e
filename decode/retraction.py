"""When KV memory runs short: which requests are retracted, where their pages go, and how they come back.

    running ─► retracting (its step in flight settles) ─► backing_up ─► retracted ─► restoring ─► joins again
                  ├─ may still finish                                                     ▲
                  └─ no room in host memory ─► queued ─► extending (`local_prompts`) ─────┘

Pages go to host memory and return without recomputation. Where that is full, a request keeps nothing, and its tokens
are computed again in its turn; a worker that does not do so returns it to the router. Retracted requests stand in line:
they resume first in, first out, before anything new is admitted. Requests below their tenant's share are the exception:
a limited number of them is backfilled meanwhile. Where the first in line does not fit for the length of a turn, running
ones leave for it (`turns`); on a worker that computes nothing again, as far as host memory has room for their pages.

When pages run short, victims are those whose turn is over, and where there is none, those that were retracted seldom:
else a large one would never end among many small ones. One that has just returned stays until it has got a token; if
all have just returned, the last of them leaves. Of these the tenant that holds most loses one: whose turn has lasted
longest, or while nobody is in line, in SGLang's order: fewest output tokens first, the longest prompt on ties.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from decode.counters import DecodeCounters
from decode.lifecycle import DecodeEvent, DecodeState
from decode.local_prompts import LocalPrompts
from decode.turns import Turns
from shared.batch.effects import Backup, Restore, WorkerEffect
from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.kv.page_pool import PagePool, PageState
from shared.scheduling.request_states import RequestStates
from shared.scheduling.tenant_shares import heaviest_tenant

_RETURNED = (DecodeState.JOINING, DecodeState.RUNNING)
_COPIED = (DecodeState.BACKING_UP, DecodeState.RESTORING, DecodeState.ABORTING)


@dataclass(slots=True)
class _Copy:
    req: Req
    host_pages: list[int]
    restoring: bool
    began: float  # seconds


@dataclass(slots=True)
class Retraction:
    """The retracted requests, from their last step in the batch to the copy that brings their pages back."""

    memory: KvMemory
    host: PagePool
    states: RequestStates[DecodeState, DecodeEvent]
    counters: DecodeCounters
    effects: list[WorkerEffect]
    steps_ahead: int  # requests are retracted until this many steps of the others fit
    pages_kept: int  # of the pool: one tenant must not take them alone
    retractions_max: int  # a request retracted this often is retracted last; it can still be retracted
    turns: Turns
    prompts: LocalPrompts
    growth_within: Callable[
        [Collection[Req], float], int
    ]  # pages that requests are expected to take in seconds
    settling: list[Req] = field(default_factory=list)  # their last step may be in flight
    _backfilled: int = 0
    _copies: dict[int, _Copy] = field(default_factory=dict)
    # With their host pages; one that is to be computed again has none.
    _line: deque[tuple[Req, list[int]]] = field(default_factory=deque)
    _returned: dict[Req, int] = field(
        default_factory=dict
    )  # with their tokens then: they have got none since
    _next_copy_id: int = 1

    @property
    def active(self) -> bool:
        """Whether a retracted request has not returned: meanwhile only those below their share come in."""
        return bool(self.settling or self._line or self._copies or self.prompts.recomputed)

    @property
    def backfilled(self) -> int:
        """How many requests were admitted since `active`."""
        return self._backfilled if self.active else 0

    def on_admitted(self) -> None:
        """Count a new request; if others are retracted, it was backfilled before them."""
        self._backfilled = self.backfilled + self.active

    def on_put_back(self) -> None:
        """A new request has gone again before it ran."""
        self._backfilled = max(0, self.backfilled - 1)

    @property
    def copying(self) -> bool:
        """Whether the device has copies to report."""
        return bool(self._copies)

    @property
    def count(self) -> int:
        """Requests that were retracted and have not returned."""
        return len(self.settling) + len(self._copies) + len(self._line) + len(self.prompts.recomputed)

    @property
    def line(self) -> list[Req]:
        """Requests that hold no pages of the pool, in the order in which they resume."""
        return [req for req, _ in self._line]

    @property
    def in_line(self) -> Mapping[DecodeState, list[Req]]:
        """Requests in line, by state."""
        return {
            state: [req for req in self.line if req.state is state]
            for state in (DecodeState.RETRACTED, DecodeState.QUEUED)
        }

    @property
    def paused(self) -> list[Req]:
        """Requests that do not decode and have no step in flight that does: in line, or on the way there or back."""
        backing_up = [copy.req for copy in self._copies.values() if copy.req.state is DecodeState.BACKING_UP]
        return [*self.line, *backing_up, *self.prompts.recomputed]

    @property
    def copied(self) -> Mapping[DecodeState, list[Req]]:
        """Requests whose pages are being copied, by state."""
        copied = [copy.req for copy in self._copies.values()]
        return {state: [req for req in copied if req.state is state] for state in _COPIED}

    # ---- out of the batch ----

    def retract_until_fits(self, running: Collection[Req]) -> list[Req]:
        """Retract requests until the steps ahead of the others fit; one always stays. Returns the victims.

        Those that end by length with the step in flight give their pages back anyway.
        """
        if (
            len(running) * self.memory.pages_for(self.steps_ahead) + self.pages_kept
            <= self.memory.available_pages
        ):
            return []  # nobody can want more: most steps need no look at each request
        ending = sum(
            self.memory.releasable_pages(req) for req in running if req.launched_len >= req.final_kv_len
        )
        staying = [req for req in running if req.launched_len < req.final_kv_len]
        victims: list[Req] = []
        while len(staying) > 1 and self.pages_wanted(staying) + self.pages_kept > (
            self.memory.available_pages + ending + self.pages_soon_free()
        ):
            victim = self.victim(staying)
            staying.remove(victim)
            victims.append(victim)
            self._retract(victim)
        return victims

    def lacks_pages(self, running: Collection[Req], *, alone: bool = False) -> bool:
        """Whether the steps ahead of `running` lack pages, so that somebody must give up some. One alone keeps none.

        `alone`: whether it is one, which cannot be retracted itself.
        """
        ending = sum(
            self.memory.releasable_pages(req) for req in running if req.launched_len >= req.final_kv_len
        )
        staying = [req for req in running if req.launched_len < req.final_kv_len]
        if alone and len(staying) > 1:
            return False
        kept = self.pages_kept if len(staying) > 1 else 0
        free = self.memory.available_pages + ending + self.pages_soon_free()
        return bool(staying) and self.pages_wanted(staying) + kept > free

    def pages_wanted(self, reqs: Iterable[Req]) -> int:
        """Pages that these requests will take within the steps ahead."""
        return sum(
            self.memory.pages_missing(req, min(req.growing_from + self.steps_ahead, req.final_kv_len))
            for req in reqs
        )

    def pages_soon_free(self) -> int:
        """Pages that will be free without another retraction."""
        backing_up = [copy.req for copy in self._copies.values() if not copy.restoring]
        releasable = sum(map(self.memory.releasable_pages, [*self.settling, *backing_up]))
        return releasable + self.memory.pool.count(PageState.RETIRING)

    def victim(self, running: list[Req]) -> Req:
        """The request to retract next."""
        gone_on = [req for req in running if req not in self._returned]
        if not gone_on:
            return next(req for req in reversed(self._returned) if req in running)
        among = self.turns.over(running) if self.active else []
        among = among or [req for req in gone_on if req.retractions < self.retractions_max] or gone_on
        heaviest = heaviest_tenant(among)
        of_heaviest = [req for req in among if req.tenant == heaviest]
        if self.active:
            return self.turns.longest(of_heaviest)
        return min(of_heaviest, key=lambda req: (req.output_len, -req.prompt_len, req.sequence))

    def start_backups(self) -> list[Req]:
        """Back up the requests whose last step has settled, or queue them where host memory has no room for them.

        Returns those that can neither be backed up nor computed again here.
        """
        if not self.settling:
            return []  # as nearly always
        settled = [req for req in self.settling if req.launched_len == req.kv_len]
        without_room = [req for req in settled if not self._back_up(req)]
        if not self.prompts.enabled:
            return without_room
        for req in without_room:
            self._queue(req)
        return []

    # ---- turns ----

    def look(self, running: Iterable[Req]) -> None:
        """Note whose turn begins, who waits, and who has got a token since it returned."""
        if self._returned:
            self._returned = {
                req: length
                for req, length in self._returned.items()
                if req.output_len == length and req.state in _RETURNED
            }
        self.turns.look(running, self.line, self.count)

    def take_turns(self, running: Collection[Req], present: Collection[Req], *, has_slot: bool) -> list[Req]:
        """Retract those whose turn is over, until the first in line fits beside the others; none if it would not fit.

        `present` are all that hold pages and do not leave by themselves. Returns those that leave.
        """
        if not self._line or not self.turns.has_waited(head := self._line[0][0]):
            return []
        present = [*present, *self._returning]
        lacking = self.memory.pages_lacking(head, head.kv_len)
        lacking += self._growth_beside(present) - self.pages_soon_free()
        if lacking <= 0 and (has_slot or self.settling):
            return []
        leaving = self._leaving_for(head, running, present)
        for req in leaving:
            self._retract(req)
        self.counters.turns += len(leaving)
        return leaving

    @property
    def _returning(self) -> list[Req]:
        """Requests that have pages for all their tokens, and do not run yet."""
        restoring = [copy.req for copy in self._copies.values() if copy.restoring]
        return [*restoring, *self.prompts.recomputed]

    def _leaving_for(self, head: Req, running: Iterable[Req], present: Collection[Req]) -> list[Req]:
        """As few as make room for `head`; none if all are not enough.

        No more than host memory has room for, unless they can be computed again here.
        """
        staying, leaving = list(present), list[Req]()
        host_free = self.host.free - sum(self.memory.pages_for(req.launched_len) for req in self.settling)
        lacking = self.memory.pages_lacking(head, head.kv_len) - self.pages_soon_free()
        for req in self.turns.over(req for req in running if req.launched_len < req.final_kv_len):
            host_free -= self.memory.pages_for(req.launched_len)
            if host_free < 0 and not self.prompts.enabled:
                return []
            staying.remove(req)
            leaving.append(req)
            lacking -= self.memory.releasable_pages(req)
            if lacking + self._growth_beside(staying) <= 0 or not staying:
                return leaving
        return []

    def _growth_beside(self, present: Collection[Req]) -> int:
        """Pages that are kept free beside the first in line: what all are expected to take while it has its turn."""
        if not present:
            return 0
        least = self.pages_wanted(present) + len(present) + 1
        return max(least, self.growth_within(present, self.turns.seconds)) + self.pages_kept

    # ---- back into the batch ----

    def resume(self, present: list[Req]) -> Req | None:
        """Bring the first retracted request back if its pages fit beside the growth of `present`; returns it."""
        if not self._line:
            return None
        growth_pages = self._growth_beside([*present, *self._returning])
        if self.memory.available_pages < growth_pages:
            return None
        req, host_pages = self._line[0]
        if req.state is DecodeState.QUEUED and self.prompts.recomputed:
            return (
                None  # one after the other: nothing can take back the pages of one that waits to be computed
            )
        if self.memory.pages_lacking(req, req.kv_len) + growth_pages > 0:
            return None
        self.memory.match(req, req.kv_len)
        cached = len(req.pages)
        missing = self.memory.pages_for(req.kv_len) - cached
        copied = req.state is DecodeState.RETRACTED
        pages = self.memory.allocate(req, missing, PageState.COPYING if copied else PageState.OWNED)
        if pages is None:  # they retire first
            self.memory.unmatch(req)
            return None
        self._line.popleft()
        if copied:
            self._restore(req, host_pages, cached, pages)
        elif missing:
            self.states.advance(req, DecodeEvent.RECOMPUTE_STARTED)
            self.prompts.start(req, samples=False)
        else:
            self.states.advance(req, DecodeEvent.ALL_CACHED)
            self._note_return(req)
        return req

    def drop(self, req: Req) -> None:
        """Take a request out of the line; its host pages are free."""
        entry = next(entry for entry in self._line if entry[0] is req)
        self._line.remove(entry)
        self.host.retire(entry[1], PageState.OWNED, after_step=0)

    # ---- copies ----

    def on_copy(self, copy_id: int) -> Req:
        """A copy is done; returns its request, which is `retracted`, `joining`, or ended if it was cancelled."""
        copy = self._copies.pop(copy_id)
        self.turns.copied("restore" if copy.restoring else "backup", copy.began)
        return self._on_restored(copy) if copy.restoring else self._on_backed_up(copy)

    def on_recomputed(self, req: Req, seconds: float) -> None:
        """A request that was queued has its KV again; the device has spent so many seconds on it."""
        self.turns.returned(seconds)
        self._note_return(req)
        self.states.advance(req, DecodeEvent.RECOMPUTED)

    def _on_backed_up(self, copy: _Copy) -> Req:
        req = copy.req
        self.memory.release(req, PageState.COPYING)
        self.host.move(copy.host_pages, PageState.COPYING, PageState.OWNED)
        self.states.advance(req, DecodeEvent.BACKED_UP)
        if req.state is DecodeState.RETRACTED:
            self._line.append((req, copy.host_pages))
        else:
            self.host.retire(copy.host_pages, PageState.OWNED, after_step=0)
        return req

    def _on_restored(self, copy: _Copy) -> Req:
        req = copy.req
        self.turns.returned(0.0)
        self.host.retire(copy.host_pages, PageState.COPYING, after_step=0)
        self.memory.pool.move(req.owned, PageState.COPYING, PageState.OWNED)
        self._note_return(req)
        self.states.advance(req, DecodeEvent.RESTORED)
        if req.state is not DecodeState.JOINING:
            self.memory.release(req)
        return req

    def _note_return(self, req: Req) -> None:
        self.counters.resumes += 1
        self._returned[req] = req.output_len

    def _retract(self, req: Req) -> None:
        """Retract a request: its pages are copied once its step in flight has settled."""
        req.retractions += 1
        self.counters.retractions += 1
        self.states.advance(req, DecodeEvent.RETRACTED)
        self.settling.append(req)

    def _queue(self, req: Req) -> None:
        """Put a request in line that keeps nothing but what the tree keeps of it."""
        self.settling.remove(req)
        self.memory.commit(req)
        self.memory.release(req)
        self.states.advance(req, DecodeEvent.QUEUED)
        self._line.append((req, []))

    def _restore(self, req: Req, host_pages: list[int], cached: int, pages: list[int]) -> None:
        """Copy what is not cached back to these pages."""
        self.states.advance(req, DecodeEvent.RESTORE_STARTED)
        copy = _Copy(req, host_pages, restoring=True, began=self.turns.now)
        self._copy(copy, Restore, host_pages[cached:], pages)
        self.host.move(host_pages, PageState.OWNED, PageState.COPYING)

    def _back_up(self, req: Req) -> bool:
        count = self.memory.pages_for(req.kv_len)
        if self.host.free < count:
            return False
        self.settling.remove(req)
        self.states.advance(req, DecodeEvent.BACKUP_STARTED)
        host_pages = self.host.allocate(count, PageState.COPYING)
        self.memory.pool.move(req.owned, PageState.OWNED, PageState.COPYING)
        self._copy(
            _Copy(req, host_pages, restoring=False, began=self.turns.now),
            Backup,
            req.pages[:count],
            host_pages,
        )
        self.counters.backups += 1
        return True

    def _copy(
        self, copy: _Copy, kind: type[Backup] | type[Restore], source: list[int], target: list[int]
    ) -> None:
        self._copies[self._next_copy_id] = copy
        self.effects.append(kind(self._next_copy_id, tuple(source), tuple(target)))
        self._next_copy_id += 1

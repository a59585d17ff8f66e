"""When KV memory runs short: who steps back, where its pages go, and how it comes back.

    running ─► leaving (its step in flight settles) ─► backing up ─► retracted ─► restoring ─► joins again
                  └─ may still finish                    └─ no room in host memory: sent back to the router

Pages go to host memory and return without recomputation. Retracted requests resume first in, first out, before
anything new is admitted. The order of victims is SGLang's: fewest output tokens first, the longest prompt on ties.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from decode.counters import DecodeCounters
from shared.effects import Backup, Effect, Restore
from shared.kv.kv_memory import KvMemory
from shared.kv.page_pool import PagePool, PageState
from shared.req import Req


@dataclass(slots=True)
class _Copy:
    req: Req
    host_pages: list[int]
    restoring: bool


@dataclass(slots=True)
class Retraction:
    """The requests that stepped back."""

    memory: KvMemory
    host: PagePool
    counters: DecodeCounters
    effects: list[Effect]
    steps_ahead: int  # so many steps must fit, or somebody steps back
    retractions_max: int  # so often retracted, a request is taken last: an order, not a veto
    _leaving: list[Req] = field(default_factory=list)
    _copies: dict[int, _Copy] = field(default_factory=dict)
    _retracted: deque[tuple[Req, list[int]]] = field(default_factory=deque)  # with their host pages
    _next_copy_id: int = 1

    @property
    def pressed(self) -> bool:
        """Whether anybody has stepped back and not returned: nothing new is admitted meanwhile."""
        return bool(self._leaving or self._retracted or self._copies)

    @property
    def copying(self) -> bool:
        """Whether the device has copies to report."""
        return bool(self._copies)

    @property
    def restoring(self) -> list[Req]:
        """Requests whose pages are on their way back."""
        return [copy.req for copy in self._copies.values() if copy.restoring]

    @property
    def requests(self) -> list[Req]:
        """Everyone who stepped back, in the order of the states."""
        copying = [copy.req for copy in self._copies.values()]
        return [*self._leaving, *copying, *(req for req, _ in self._retracted)]

    def pages_on_their_way(self) -> int:
        """Pages that will be free without retracting anybody else."""
        backing_up = [copy.req for copy in self._copies.values() if not copy.restoring]
        given_up = sum(map(self.memory.releasable_pages, [*self._leaving, *backing_up]))
        return given_up + self.memory.pool.count(PageState.RETIRING)

    def pages_wanted(self, reqs: Iterable[Req]) -> int:
        """Pages that these requests will take within the steps ahead."""
        return sum(
            req.pages_missing(
                min(req.launched_len + self.steps_ahead, req.final_kv_len), self.memory.page_size
            )
            for req in reqs
        )

    def step_back(self, running: Iterable[Req]) -> list[Req]:
        """Take out requests until the steps ahead of the others fit; one always stays.

        Those that end by length with the step in flight give their pages back anyway.
        """
        ending = sum(
            self.memory.releasable_pages(req) for req in running if req.launched_len >= req.final_kv_len
        )
        staying = [req for req in running if req.launched_len < req.final_kv_len]
        victims: list[Req] = []
        while len(staying) > 1 and self.pages_wanted(staying) > (
            self.memory.available_pages + ending + self.pages_on_their_way()
        ):
            victim = self.victim(staying)
            staying.remove(victim)
            victims.append(victim)
            self.retract(victim)
        return victims

    def victim(self, running: list[Req]) -> Req:
        """Who steps back next."""
        return min(
            running,
            key=lambda req: (
                req.retractions >= self.retractions_max,
                req.output_len,
                -req.prompt_len,
                req.sequence,
            ),
        )

    def retract(self, req: Req) -> None:
        """Take the request out; its pages are copied once its step in flight has settled."""
        req.retractions += 1
        self.counters.retractions += 1
        self._leaving.append(req)

    def advance(self) -> list[Req]:
        """Start the backups that can start; returns the requests to send back, for lack of host memory."""
        settled = [req for req in self._leaving if req.launched_len == req.kv_len]
        self._leaving = [req for req in self._leaving if req.launched_len != req.kv_len]
        return [req for req in settled if not self._back_up(req)]

    def resume(self, present: list[Req]) -> Req | None:
        """Bring the first retracted request back if its pages fit beside the growth of those who are here."""
        if not self._retracted:
            return None
        staying = [*present, *self.restoring]
        growth_pages = self.pages_wanted(staying) + len(staying) + 1 if staying else 0
        if self.memory.available_pages < growth_pages:
            return None
        req, host_pages = self._retracted[0]
        self.memory.match(req, req.kv_len)
        missing = len(host_pages) - len(req.pages)
        if self.memory.available_pages < missing + growth_pages or not self.memory.cache.make_room(missing):
            self.memory.release(req)
            return None
        self._retracted.popleft()
        cached = len(req.pages)
        pages = self.memory.allocate(req, missing, PageState.COPYING)
        assert pages is not None
        self._copy(_Copy(req, host_pages, restoring=True), Restore, host_pages[cached:], pages)
        self.host.move(host_pages, PageState.OWNED, PageState.COPYING)
        return req

    def on_copy(self, copy_id: int) -> Req | None:
        """A copy is done; returns the request that may join again, if it was a restore."""
        copy = self._copies.pop(copy_id)
        if copy.restoring:
            self.host.retire(copy.host_pages, PageState.COPYING, after_step=0)
            self.memory.pool.move(copy.req.owned, PageState.COPYING, PageState.OWNED)
            self.counters.resumes += 1
            return copy.req
        self.memory.release(copy.req, PageState.COPYING)
        self.host.move(copy.host_pages, PageState.COPYING, PageState.OWNED)
        self._retracted.append((copy.req, copy.host_pages))
        return None

    def drop(self, req: Req) -> bool:
        """The request is wanted no more. False: it did not step back, or its copy must end first."""
        if req in self._leaving:
            self._leaving.remove(req)
            self.memory.release(req)
            return True
        for entry in self._retracted:
            if entry[0] is req:
                self._retracted.remove(entry)
                self.host.retire(entry[1], PageState.OWNED, after_step=0)
                return True
        return False

    def drop_first(self) -> Req | None:
        """Give up the request that would resume next; None if there is none."""
        if not self._retracted:
            return None
        req, host_pages = self._retracted.popleft()
        self.host.retire(host_pages, PageState.OWNED, after_step=0)
        return req

    def is_copying(self, req: Req) -> bool:
        """Whether a copy from or to the request's pages is under way."""
        return any(copy.req is req for copy in self._copies.values())

    def _back_up(self, req: Req) -> bool:
        count = self.memory.pages_for(req.kv_len)
        if self.host.free < count:
            self.counters.sent_back += 1
            return False
        host_pages = self.host.allocate(count, PageState.COPYING)
        self.memory.pool.move(req.owned, PageState.OWNED, PageState.COPYING)
        self._copy(_Copy(req, host_pages, restoring=False), Backup, req.pages[:count], host_pages)
        self.counters.backups += 1
        return True

    def _copy(
        self, copy: _Copy, kind: type[Backup] | type[Restore], source: list[int], target: list[int]
    ) -> None:
        self._copies[self._next_copy_id] = copy
        self.effects.append(kind(self._next_copy_id, tuple(source), tuple(target)))
        self._next_copy_id += 1

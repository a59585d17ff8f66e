"""The state of every KV page, and the proof that all of them are accounted for.

A page is in exactly one state, and this class is the only writer of page states. It knows page numbers and step
numbers, nothing of what a page holds, of requests, of prefixes or of memory: the same class keeps the books of the
device's pages and of the pages in host memory.

    FREE ──allocate──► OWNED | ARRIVING | COPYING
                         │ move, along the edges of MOVES: an arrived page is OWNED, an inserted one TREE, …
                         ▼
         any of them ──retire(after_step)──► RETIRING ──reclaim(completed_step)──► FREE

RETIRING is there because steps run ahead of the CPU: a launched step may still read or write a page that its
request has given up, so the page is not given to another request before the device has completed that step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable

from shared.primitives.errors import InvariantError
from shared.primitives.state_table import StateName


class PageState(StateName):
    """Who holds a page."""

    FREE = "free"
    TREE = "tree"  # the radix cache: below a settled length, read-only
    OWNED = "owned"  # one request
    ARRIVING = "arriving"  # the target of a fetch in flight
    COPYING = "copying"  # the source or target of a copy between device and host memory
    RETIRING = "retiring"  # given up, but a launched step may still touch it
    QUARANTINED = "quarantined"  # the target of a fetch that was never proven to have ended


MOVES: dict[PageState, tuple[PageState, ...]] = {
    PageState.OWNED: (PageState.TREE, PageState.COPYING),
    PageState.ARRIVING: (PageState.OWNED, PageState.QUARANTINED),
    PageState.COPYING: (PageState.OWNED,),
}
_ALLOCATED_AS = (PageState.OWNED, PageState.ARRIVING, PageState.COPYING)
_RETIRED_FROM = (*_ALLOCATED_AS, PageState.TREE, PageState.QUARANTINED)
_STATES = tuple(PageState)
_CODES = {state: code for code, state in enumerate(_STATES)}  # FREE is 0


def pages_for_tokens(tokens: int, page_size: int) -> int:
    """Pages that hold the KV of `tokens` tokens."""
    return -(-tokens // page_size)


class PagePool:
    """The states of pages 0 … total - 1. Pages are handed out in the order they became free."""

    def __init__(self, total: int):
        self.total = total
        self.completed = 0  # the last step known to have completed
        self._codes = bytearray(total)  # of their states: a byte a page is counted at the speed of memory
        self._counts = dict.fromkeys(PageState, 0) | {PageState.FREE: total}
        self._free = deque(range(total))
        self._retiring: dict[int, list[int]] = {}  # by the step they wait for

    @property
    def free(self) -> int:
        """Pages that `allocate` can give now."""
        return len(self._free)

    def count(self, state: PageState) -> int:
        """Pages in `state`."""
        return self._counts[state]

    def counts(self) -> dict[PageState, int]:
        """Pages in each state."""
        return dict(self._counts)

    def state(self, page: int) -> PageState:
        """The state of one page."""
        return _STATES[self._codes[page]]

    def not_in(self, state: PageState, pages: Iterable[int]) -> list[int]:
        """The pages among `pages` that are in another state."""
        code, codes = _CODES[state], self._codes
        return [page for page in pages if codes[page] != code]

    def allocate(self, count: int, state: PageState) -> list[int]:
        """Take `count` free pages into `state`; raises `InvariantError` if fewer are free."""
        if state not in _ALLOCATED_AS:
            raise InvariantError(f"pages are not allocated as {state.name}")
        if not 0 <= count <= len(self._free):
            raise InvariantError(f"{count} pages wanted as {state.name}, {len(self._free)} free")
        pages = [self._free.popleft() for _ in range(count)]
        self._transfer(pages, PageState.FREE, state)
        return pages

    def move(self, pages: Collection[int], before: PageState, after: PageState) -> None:
        """Hand pages from one holder to another; raises `InvariantError` unless each is in `before`."""
        if after not in MOVES.get(before, ()):
            raise InvariantError(f"pages do not move from {before.name} to {after.name}")
        self._transfer(pages, before, after)

    def retire(self, pages: Iterable[int], before: PageState, after_step: int) -> None:
        """Give pages up: FREE once step `after_step` has completed, which may be at once."""
        if before not in _RETIRED_FROM:
            raise InvariantError(f"pages do not retire from {before.name}")
        retired = list(pages)
        if after_step <= self.completed:
            self._transfer(retired, before, PageState.FREE)
            self._free.extend(retired)
        elif retired:
            self._transfer(retired, before, PageState.RETIRING)
            self._retiring.setdefault(after_step, []).extend(retired)

    def reclaim(self, completed_step: int) -> None:
        """The device has completed all steps up to `completed_step`."""
        if completed_step <= self.completed:
            return  # nothing waits for a step that is known to have completed
        self.completed = completed_step
        for step in sorted(step for step in self._retiring if step <= completed_step):
            pages = self._retiring.pop(step)
            self._transfer(pages, PageState.RETIRING, PageState.FREE)
            self._free.extend(pages)

    def check(self) -> None:
        """Prove that every page is accounted for exactly once; raises `InvariantError` naming the page."""
        if sum(self._counts.values()) != self.total:
            raise InvariantError(f"{self.total} pages, but the states add up to {self._counts}")
        met = {state: self._codes.count(code) for state, code in _CODES.items()}
        if met != self._counts:
            raise InvariantError(f"page states {met}, but counted {self._counts}")
        self._check_listed("free list", self._free, PageState.FREE)
        waiting = [page for step in self._retiring for page in self._retiring[step]]
        self._check_listed("retiring list", waiting, PageState.RETIRING)
        overdue = [step for step in self._retiring if step <= self.completed]
        if overdue:
            raise InvariantError(f"pages still wait for completed steps {overdue}")

    def _check_listed(self, name: str, pages: Collection[int], state: PageState) -> None:
        for page in self.not_in(state, pages)[:1]:
            raise InvariantError(f"page {page} is in the {name} but {self.state(page).name}")
        if len(set(pages)) != len(pages):
            raise InvariantError(f"page {Counter(pages).most_common(1)[0][0]} is twice in the {name}")
        if len(pages) != self._counts[state]:
            raise InvariantError(f"{len(pages)} pages in the {name}, but {self._counts[state]} {state.name}")

    def _transfer(self, pages: Collection[int], before: PageState, after: PageState) -> None:
        codes, code, next_code = self._codes, _CODES[before], _CODES[after]
        for page in pages:
            if codes[page] != code:
                met = self.state(page).name
                raise InvariantError(f"page {page} is {met}, not {before.name} on its way to {after.name}")
            codes[page] = next_code
        self._counts[before] -= len(pages)
        self._counts[after] += len(pages)

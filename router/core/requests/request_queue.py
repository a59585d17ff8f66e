"""A queue of requests that wait for a worker: streams that have begun first, then by priority, fairly among tenants.

A request is charged once, when it first comes to this queue. If it returns, because a worker refused it or was lost,
it keeps its place. The queue does not know what its requests wait for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from math import inf

from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest


class RequestQueue:
    """The requests in `state`, in the order in which to place them. Each takes O(log n) comparisons."""

    def __init__(self, state: RequestState) -> None:
        self._state = state
        self._queue: list[LiveRequest] = []
        self._unserved: set[str] = set()  # charged, and no worker has taken them
        self.clock = VirtualTime()

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, live: LiveRequest, tokens: int) -> None:
        """Put a request in its place; `tokens` is what it costs here, if it has not been charged before."""
        self.charge(live, tokens)
        insort(self._queue, live, key=self._order)

    def charge(self, live: LiveRequest, tokens: int) -> None:
        """Take its turn, unless it has been charged before: it may go past this queue."""
        if self._state not in live.starts:
            self._unserved.add(live.rid)
            live.starts[self._state] = self.clock.start(live.tenant.name, tokens / live.tenant.weight)

    def remove(self, live: LiveRequest) -> None:
        """Take a request out: a worker is asked to take it, or it ends."""
        place = bisect_left(self._queue, self._order(live), key=self._order)
        assert self._queue[place] is live, live.rid
        del self._queue[place]

    def discard(self, live: LiveRequest) -> None:
        """Forget a request wherever it stands, in O(n): a step of it broke off, so its place may not be found."""
        self._queue = [each for each in self._queue if each is not live]
        self._forget(live)

    def served(self, live: LiveRequest) -> None:
        """A worker has taken it. Before that the clock stands: a refused request must not put newcomers behind it."""
        if live.rid in self._unserved:
            self.clock.serve(live.starts[self._state])
            self._forget(live)

    def ended(self, live: LiveRequest, unused: int) -> None:
        """Take out a request that has ended, and credit the `unused` tokens of its charge."""
        if live.starts.pop(self._state, None) is not None:
            self.clock.give_back(live.tenant.name, unused / live.tenant.weight)
            self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        self._unserved.discard(live.rid)
        if not self._unserved:
            self.clock.rest()

    def place_of_new(self, tenant: str, priority: int) -> int:
        """How many would stand before the next request of a tenant."""
        return bisect_right(
            self._queue, (True, -priority, self.clock.next_start(tenant), inf), key=self._order
        )

    def in_order(self) -> list[LiveRequest]:
        """A copy, so that requests may be removed while it is walked."""
        return list(self._queue)

    def first(self, count: int) -> list[LiveRequest]:
        """Up to so many that are first in it."""
        return self._queue[:count]

    def _order(self, live: LiveRequest) -> tuple[bool, int, float, float]:
        return (not live.output, -live.request.priority, live.starts[self._state], live.arrival)


# ---- start-time fair queueing (Goyal, Vin and Cheng, 1996), in tokens ------------------------------------------------
# Each request gets a *start*: the later of the clock and the end of its tenant's request before it. Its own end is its
# start plus what it costs, divided by its tenant's weight. The request with the least start goes first, and the clock
# follows the starts of those that go. So a tenant that comes new stands at the clock, however many requests of another
# one wait with later starts, and two that always wait get tokens in proportion to their weights.
#
#     clock ─► 0        10        20        30
#     A        [a1     ][a2     ][a3     ]           three requests of 10 tokens
#     B                 [b1 ]                         came when a2 had gone: b1 goes before a3
#
# It knows neither requests nor queues. A tenant is forgotten when the clock has passed its end.


TENANTS_MAX = 10_000  # remembered at a time; those beyond start at the clock again


class VirtualTime:
    """Hands out starts. Costs are tokens divided by the tenant's weight."""

    def __init__(self) -> None:
        self._now = 0.0
        self._last: OrderedDict[str, tuple[float, float]] = OrderedDict()  # last start and end, by tenant

    def __len__(self) -> int:
        return len(self._last)

    def start(self, tenant: str, cost: float) -> float:
        """The start of the tenant's next request."""
        last_start, last_end = self._last.pop(tenant, (self._now, self._now))
        start = max(self._now, last_start, last_end)
        self._last[tenant] = (start, start + cost)
        if len(self._last) > TENANTS_MAX:
            self._last.popitem(last=False)
        return start

    def next_start(self, tenant: str) -> float:
        """The start that the tenant's next request would get."""
        return max(self._now, *self._last.get(tenant, (self._now,)))

    def serve(self, start: float) -> None:
        """The request with this start goes."""
        self._now = max(self._now, start)

    def give_back(self, tenant: str, cost: float) -> None:
        """Part of what the tenant's requests were to cost is not needed; its next one starts earlier."""
        if tenant in self._last:
            start, end = self._last[tenant]
            self._last[tenant] = (start, end - cost)

    def rest(self) -> None:
        """Make all tenants equal again: no request waits."""
        ends = [end for _, end in self._last.values()]
        self._now = max([self._now, *ends])
        self._last.clear()

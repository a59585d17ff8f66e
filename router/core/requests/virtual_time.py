"""Whose turn it is among tenants: start-time fair queueing (Goyal, Vin and Cheng, 1996), in tokens.

Each request gets a *start*: the later of the clock and the end of its tenant's request before it. Its own end is its
start plus what it costs, divided by its tenant's weight. The request with the least start goes first, and the clock
follows the starts of those that go. So a tenant that comes new stands at the clock, however many requests of another
one wait with later starts, and two that always wait get tokens in proportion to their weights.

    clock ─► 0        10        20        30
    A        [a1     ][a2     ][a3     ]           three requests of 10 tokens
    B                 [b1 ]                         came when a2 had gone: b1 goes before a3

It knows neither requests nor queues. A tenant is forgotten when the clock has passed its end.
"""

from __future__ import annotations

from collections import OrderedDict

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

"""How many bytes this process may hold of something: in all, and for one tenant. There are two budgets.

*Answers* weigh from before they are computed until they are written (`answers.answer_bytes`). *Requests*: a body
weighs from its first byte until its request is tokenized or refused. It waits as the bytes that came; what it is
decoded to lives only in a tokenizer thread, and is bounded there. So what requests take is at most

    router_bytes_max, and 64 MiB for each of tokenizer_threads

Half of the budget is what one tenant may hold, so that no tenant can keep the others out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from router.replies import OverloadedError

TENANT_SHARE = 2  # the part of the budget that one tenant may hold: one half


class ByteBudget:
    """Bytes held, in all and by tenant."""

    def __init__(self, bytes_max: int, refusal: str, full: str):
        """`refusal`: what is said to a client for whose bytes there is no room; `full`: the same for metrics."""
        self._full = full
        self._bytes_max = bytes_max
        self._refusal = refusal
        self._by_tenant: Counter[str] = Counter()
        self.held_bytes = 0  # of all tenants

    @contextmanager
    def hold(self, tenant: str) -> Iterator[Holding]:
        """What one request holds; it is given back however the request ends."""
        holding = Holding(self, tenant)
        try:
            yield holding
        finally:
            assert 0 <= holding.held_bytes <= self._by_tenant[tenant] <= self.held_bytes, tenant
            self.held_bytes -= holding.held_bytes
            self._by_tenant[tenant] -= holding.held_bytes
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]

    def take(self, tenant: str, more_bytes: int) -> None:
        """Count `more_bytes`; raises `OverloadedError`, and counts nothing, if there is no room for them."""
        assert more_bytes >= 0, more_bytes
        room = self._bytes_max - self.held_bytes
        own_room = self._bytes_max // TENANT_SHARE - self._by_tenant[tenant]
        if more_bytes > min(room, own_room):
            raise OverloadedError(self._refusal, self._full)
        self.held_bytes += more_bytes
        self._by_tenant[tenant] += more_bytes


class Holding:
    """The bytes that one request holds."""

    def __init__(self, budget: ByteBudget, tenant: str):
        self._budget = budget
        self._tenant = tenant
        self.held_bytes = 0

    def add(self, more_bytes: int) -> None:
        """Hold more; raises `OverloadedError` if the budget has no room."""
        self._budget.take(self._tenant, more_bytes)
        self.held_bytes += more_bytes

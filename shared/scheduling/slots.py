"""The slots of a device: places for what it keeps of a request between steps.

    take ─► req.slot ─► give_back      the one that was given back first is taken first

A slot may be taken as soon as it is free: the device applies joins in the order of the steps.
"""

from __future__ import annotations

from collections import deque

from shared.batch.req import Req
from shared.primitives.errors import InvariantError


class Slots:
    """Which of `total` slots are free."""

    def __init__(self, total: int):
        self.total = total
        self._free = deque(range(total))

    @property
    def free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Slots that requests have."""
        return self.total - len(self._free)

    def take(self, req: Req) -> None:
        """Give the request a free slot; raises `InvariantError` if it has one, or none is free."""
        if req.slot is not None or not self._free:
            raise InvariantError(f"request {req.rid} has slot {req.slot}, {len(self._free)} are free")
        req.slot = self._free.popleft()

    def give_back(self, req: Req) -> None:
        """Free the slot of the request, if it has one. It may still have a row in the step in flight."""
        if req.slot is not None:
            self._free.append(req.slot)
            req.slot = None

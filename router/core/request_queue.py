"""A queue of requests that wait for a worker: higher priority first, then first come.

A request that returns keeps its place, because its order is its own. The queue does not know what they wait for.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from router.core.live_request import LiveRequest


class RequestQueue:
    """Requests in the order of `LiveRequest.order`, which is unique."""

    def __init__(self) -> None:
        self._queue: list[LiveRequest] = []

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, live: LiveRequest) -> None:
        """Put a request in its place."""
        insort(self._queue, live, key=_order)

    def remove(self, live: LiveRequest) -> None:
        """Take a request out."""
        place = bisect_left(self._queue, live.order, key=_order)
        assert self._queue[place] is live, live.rid
        del self._queue[place]

    def in_order(self) -> list[LiveRequest]:
        """A copy, so that requests may be removed while it is walked."""
        return list(self._queue)


def _order(live: LiveRequest) -> tuple[int, int]:
    return live.order

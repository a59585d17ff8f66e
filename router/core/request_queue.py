"""A line of requests that wait for a worker: higher priority first, then first come.

A request that returns keeps its place, for its order is its own. The line does not know what it waits for.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from router.core.live_request import LiveRequest


class RequestQueue:
    """Requests in the order of `LiveRequest.order`, which is unique."""

    def __init__(self) -> None:
        self._line: list[LiveRequest] = []

    def __len__(self) -> int:
        return len(self._line)

    def enter(self, live: LiveRequest) -> None:
        """Take its place."""
        insort(self._line, live, key=_order)

    def leave(self, live: LiveRequest) -> None:
        """Give its place up."""
        place = bisect_left(self._line, live.order, key=_order)
        assert self._line[place] is live, live.rid
        del self._line[place]

    def in_order(self) -> list[LiveRequest]:
        """A copy, so that those who are served may leave meanwhile."""
        return list(self._line)


def _order(live: LiveRequest) -> tuple[int, int]:
    return live.order

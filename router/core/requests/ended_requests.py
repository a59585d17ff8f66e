"""What `/debug` shows of requests that have ended."""

from __future__ import annotations

from collections import OrderedDict

from router.core.requests.live_request import LiveRequest


class EndedRequests:
    """At most `requests_max` of them; the one that ended first is forgotten first."""

    def __init__(self, requests_max: int):
        self._requests_max = requests_max
        self._shown: OrderedDict[str, dict[str, object]] = OrderedDict()

    def add(self, live: LiveRequest) -> None:
        """Remember what is shown of a request at its end."""
        self._shown.pop(live.rid, None)
        self._shown[live.rid] = live.debug()
        while len(self._shown) > self._requests_max:
            self._shown.popitem(last=False)

    def get(self, rid: str) -> dict[str, object] | None:
        """What is shown of it; None: not known (any more)."""
        return self._shown.get(rid)

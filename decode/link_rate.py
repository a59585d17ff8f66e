"""How many pages the links of a decode worker bring in a second.

Only time counts in which something has been on its way for a while: a fetch alone shows how long one takes, and not how
many fit into a second. A rate is forgotten after some seconds, since the links may be others by then.

    start ──► landed ──► landed ──► nothing is on its way any more
    ├─ BUSY_SECONDS_MIN ─┤ counts from here, with what came before
"""

from __future__ import annotations

from collections import deque

BUSY_SECONDS_MIN = 0.25  # in which something is on its way without a gap
WINDOW_SECONDS = 5.0  # of such time
FORGOTTEN_SECONDS = 10.0


class LinkRate:
    """`now` in seconds, and never less than before."""

    def __init__(self) -> None:
        self._since: float | None = None  # when the first of those on their way began
        self._counted_at = 0.0  # what came until then is in `_spans`
        self._pages = 0  # that have come since
        self._spans: deque[tuple[float, float, int]] = deque()  # end, seconds, pages

    def started(self, now: float) -> None:
        """Pages are on their way from now on."""
        if self._since is None:
            self._since = self._counted_at = now
            self._pages = 0

    def landed(self, pages: int, now: float, *, more: bool) -> None:
        """So many have come; `more`: others are on their way."""
        if self._since is None:
            return
        self._pages += pages
        if now - self._since >= BUSY_SECONDS_MIN:
            self._spans.append((now, now - self._counted_at, self._pages))
            self._counted_at, self._pages = now, 0
        if not more:
            self._since = None

    def stopped(self) -> None:
        """What was on its way has been given up."""
        self._since = None

    def per_second(self, now: float) -> float:
        """The rate, to two digits; 0.0: not known."""
        spans = self._spans
        while spans and spans[0][0] < now - FORGOTTEN_SECONDS:
            spans.popleft()
        seconds = sum(span for _, span, _ in spans)
        while spans and seconds - spans[0][1] >= WINDOW_SECONDS:
            seconds -= spans.popleft()[1]
        return float(f"{sum(pages for _, _, pages in spans) / seconds:.2g}") if seconds else 0.0

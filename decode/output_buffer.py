"""Tokens on their way to the routers: one message a router and flush, not one a token.

Tokens wait at most `flush_seconds` for others to share their message; after a pause the first ones go at once. It knows
nothing of requests.
"""

from __future__ import annotations

from shared.effects import Send
from shared.messages import Generated, Row


class OutputBuffer:
    """Rows since the last flush, by router."""

    def __init__(self, flush_seconds: float):
        self._flush_seconds = flush_seconds
        self._rows: dict[str, list[Row]] = {}
        self._next_flush = 0.0

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, router: str, row: Row) -> None:
        """Keep a row until the next flush."""
        self._rows.setdefault(router, []).append(row)

    def forget(self, router: str) -> None:
        """The router's session has ended: drop its rows."""
        self._rows.pop(router, None)

    def due(self, now: float) -> bool:
        """Whether the rows have waited `flush_seconds`, or come after a pause that long."""
        return bool(self._rows) and now >= self._next_flush

    def deadline(self) -> float | None:
        """When the rows are due, in seconds of the worker's clock; None if there are none."""
        return self._next_flush if self._rows else None

    def flush(self, now: float) -> list[Send]:
        """The messages with all rows; the buffer is empty then."""
        sends = [Send(router, Generated(tuple(rows))) for router, rows in self._rows.items()]
        if self._rows:
            self._rows = {}
            self._next_flush = now + self._flush_seconds
        return sends

"""Turns among the requests that do not all fit into KV memory: who runs, who waits in line, and for how long.

    running, its turn began ── T ──► its turn is over: it runs on until the head of the line wants its pages
    retracted, in line ─────── T ──► as the head: those whose turn is over leave until it fits, the longest first

Those that leave go to the end of the line, so nobody waits for more turns than there are requests. The length of a turn
T follows from how many run and wait: all should have had one within `ROTATION_TURNS` times `turn_seconds`. It is never
so short that copies to host memory and back take more than a twentieth of it. Where requests are computed again, it is
twice as long as that takes for all that run, up to `LONGEST_TURN`: so about a third of the device's time goes there,
and more where that bound cuts a turn short, but no more than half where one runs at a time: a turn is never shorter
than it takes to compute one again. A turn lasts until a token has come: one that leaves whenever its mask is late would
never go on. While nobody waits there are no turns.

This file counts seconds. It knows no pages and retracts nobody; `retraction` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.batch.req import Req

ROTATION_TURNS = 4  # of `turn_seconds`: in so long all that run and wait should have had a turn
COPIES_PER_TURN = 20  # a turn is as many times as long as a copy to host memory and one back
RETURNS_PER_TURN = 2  # a turn is as many times as long as all that run took to be computed again …
LONGEST_TURN = 10  # … but no longer than so many times `turn_seconds`, or than one of them took
RETURNS = 8  # that the average of their seconds remembers
LAST_COPY = 0.5  # weight of the last copy in the average of its kind


class Turns:
    """When the turns of running requests began, and since when others wait. `now` in seconds; it never decreases."""

    def __init__(self, turn_seconds: float):
        self.now = 0.0
        self._turn_seconds = turn_seconds
        self._began: dict[Req, float] = {}
        self._tokens: dict[Req, int] = {}  # of the output when the turn began
        self._waiting: dict[Req, float] = {}
        self._out = 0  # retracted requests, those that are being copied included
        self._copy_seconds = {"backup": 0.0, "restore": 0.0}
        self._return_seconds = 0.0  # of the device: what it costs on average that a request returns
        self._returns = 0
        self._most_running = 0  # at a time, since somebody was retracted

    def look(self, running: Iterable[Req], waiting: Iterable[Req], out: int) -> None:
        """Note who runs and who waits now; `out` have been retracted and have not returned. 0 ends all turns."""
        if not (out or self._out):
            return  # as nearly always
        self._out = out
        if not out:
            self._returns, self._return_seconds, self._most_running = 0, 0.0, 0
        self._began = {req: self._began.get(req, self.now) for req in running} if out else {}
        self._tokens = {req: self._tokens.get(req, req.output_len) for req in self._began}
        self._waiting = {req: self._waiting.get(req, self.now) for req in waiting}
        self._most_running = max(self._most_running, len(self._began))

    def copied(self, kind: str, began: float) -> None:
        """A copy that began then is done; `kind` is backup or restore."""
        average = self._copy_seconds[kind]
        self._copy_seconds[kind] += (self.now - began - average) * (LAST_COPY if average else 1.0)

    def returned(self, seconds: float) -> None:
        """A request runs again; the device has computed for so many seconds what it had been deprived of."""
        self._returns = min(self._returns + 1, RETURNS)
        self._return_seconds += (seconds - self._return_seconds) / self._returns

    @property
    def seconds(self) -> float:
        """How long a turn is now."""
        rotation = ROTATION_TURNS * self._turn_seconds * max(1, len(self._began)) / max(1, self._out)
        copies = COPIES_PER_TURN * sum(self._copy_seconds.values())
        returns = RETURNS_PER_TURN * max(1, self._most_running) * self._return_seconds
        returns = min(returns, max(LONGEST_TURN * self._turn_seconds, self._return_seconds))
        return max(copies, returns, min(self._turn_seconds, rotation))

    def has_waited(self, req: Req) -> bool:
        """Whether a request in line has waited for as long as a turn is."""
        return self.now - self._waiting.get(req, self.now) >= self.seconds

    def over(self, running: Iterable[Req]) -> list[Req]:
        """The requests whose turn is over, in the order in which they leave."""
        ended = [req for req in running if self.now - self._began.get(req, self.now) >= self.seconds]
        return sorted(filter(self._has_gone_on, ended), key=self._order)

    def longest(self, running: Sequence[Req]) -> Req:
        """The request that leaves first, whether or not its turn is over."""
        return min(running, key=self._order)

    def _has_gone_on(self, req: Req) -> bool:
        return req.output_len > self._tokens.get(req, req.output_len)

    def _order(self, req: Req) -> tuple[float, int, int]:
        return (self._began.get(req, self.now), -req.output_len, req.sequence)

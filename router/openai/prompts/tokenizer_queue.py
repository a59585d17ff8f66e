"""Who gets a tokenizer thread next: tenants take turns, and each one's requests go in the order they came.

One place for every request that has text to tokenize. A turn is one request however large it is, because its work is
bounded and cannot be interrupted: a tenant waits for at most one request of each other tenant. When too many wait, the
tenant with the most of them loses its last one, so that no tenant can keep the others out.

It knows neither what a request holds nor what a thread does. It belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable

from router.replies.replies import DisconnectedError, OverloadedError

Turn = asyncio.Future[None]


class TokenizerQueue:
    """`slots` requests at a time; at most `waiting_max` wait."""

    def __init__(self, slots: int, waiting_max: int):
        self._free = slots
        self._waiting_max = waiting_max
        self._lines: OrderedDict[str, deque[Turn]] = OrderedDict()  # the tenant in front has the next turn

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return sum(map(len, self._lines.values()))

    async def acquire(self, tenant: str, hangup: Callable[[], Awaitable[None]]) -> None:
        """Wait for a slot; `release` gives it back.

        Raises `OverloadedError` if too many wait, `DisconnectedError` as soon as `hangup` returns.
        """
        if self._free:
            self._free -= 1
            return
        self._make_room(tenant)
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(turn)
        watch = asyncio.ensure_future(hangup())
        watch.add_done_callback(lambda _: _fail(turn, DisconnectedError()))
        try:
            await turn
        except BaseException:
            self._give_up(tenant, turn)
            raise
        finally:
            watch.cancel()

    def release(self) -> None:
        """A slot is free: the next in turn gets it."""
        while self._lines:
            tenant, line = next(iter(self._lines.items()))
            turn = line.popleft()
            self._lines.move_to_end(tenant)
            if not line:
                del self._lines[tenant]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _make_room(self, tenant: str) -> None:
        """Raise `OverloadedError`, or refuse another tenant's last request, if too many wait."""
        if self.waiting < self._waiting_max:
            return
        overloaded = OverloadedError("too many prompts are waiting to be tokenized: try again later")
        longest = max(self._lines, key=lambda name: len(self._lines[name]), default=tenant)
        if longest == tenant or len(self._lines[longest]) <= len(self._lines.get(tenant, ())) + 1:
            raise overloaded
        _fail(self._lines[longest].pop(), overloaded)

    def _give_up(self, tenant: str, turn: Turn) -> None:
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self.release()  # the slot came at the same time
            return
        line = self._lines.get(tenant, deque())
        if turn in line:
            line.remove(turn)
        if not line:
            self._lines.pop(tenant, None)


def _fail(turn: Turn, error: Exception) -> None:
    if not turn.done():
        turn.set_exception(error)

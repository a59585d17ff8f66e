"""Events that wait until the caller of `receive` takes them, bounded; and the peers that the caller has heard of.

A `Load` is a state and not an event: what it says is over as soon as the next one comes. So the newest of a peer
replaces one that still waits, and at most one of each peer waits, however long the caller is away. Loads are outside
of the bounds, because they cannot pile up: a fleet that only tells its load never fills the inbox.

The newest waits behind all that its peer sent before it, and the older one is gone. So the caller sees what it would
have seen from a worker that tells its load less often. Nothing else changes its place. This holds across a session's
end as well: the peer's `PeerDown` follows its last messages, and a load of the next session follows its `PeerUp`.

A router gets `EVENTS_A_TAKE` at a time, so that its event loop can do other things between. What it has not got yet is
outside of the bounds: in all, twice as much may wait as they say, and two loads of a peer. A caller that gets fewer
need not come again by itself: whatever comes behind them calls `on_ready`, or has called it. A worker, which has no
`on_ready`, gets all: its loop comes once a step, which may take a second, and what it left would wait for the next.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable

from shared.links.events import LinkEvent, PeerDown, PeerUp, Received
from shared.links.session import LinkSettings
from shared.primitives.errors import InvariantError
from shared.wire.messages import Hello, Load

EVENTS_A_TAKE = 256  # about 10 ms of a router's event loop


class Inbox:
    """Filled by the link thread, taken by any other one."""

    def __init__(self, settings: LinkSettings, on_ready: Callable[[], None] | None):
        self.hellos: dict[str, Hello] = {}  # by peer: those that are up, as far as the caller of `take` knows
        self._taken: deque[LinkEvent] = deque()  # of that caller's thread; the rest is shared
        self._settings = settings
        self._on_ready = on_ready
        self._most = math.inf if on_ready is None else EVENTS_A_TAKE
        self._events: dict[int, LinkEvent] = {}  # by number, in the order they are taken
        self._loads: dict[str, int] = {}  # by peer: the number of its load among them
        self._last = 0  # the number of the last event
        self._unread_bytes = 0  # bodies of the events that are no loads
        self._woken = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def full(self) -> bool:
        """Whether a peer that sends more than loads must lose its session."""
        settings = self._settings
        return (
            len(self._events) - len(self._loads) >= settings.unread_messages_max
            or self._unread_bytes >= settings.unread_bytes_max
        )

    def put(self, events: list[LinkEvent], body_bytes: int) -> None:
        """Add events in order; `body_bytes` are those of their messages, without loads."""
        with self._changed:
            was_empty = not self._events
            for event in events:
                self._last += 1
                if isinstance(event, Received) and isinstance(event.message, Load):
                    self._events.pop(self._loads.get(event.peer, 0), None)
                    self._loads[event.peer] = self._last
                self._events[self._last] = event
            self._unread_bytes += body_bytes
            self._changed.notify()
        if was_empty and self._on_ready is not None:
            self._on_ready()

    def fail(self, failure: BaseException) -> None:
        """From now on `take` raises: nothing more will come."""
        with self._changed:
            self._failure = failure
            self._changed.notify()
        if self._on_ready is not None:
            self._on_ready()

    def wake(self) -> None:
        """Let a waiting `take` return."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def take(self, timeout_seconds: float) -> list[LinkEvent]:
        """The next events that wait; waits for one up to the timeout. Raises InvariantError after `fail`.

        `hellos` is what these and all before them say, so what the caller sends goes to sessions that it knows.
        """
        if not self._taken:
            self._taken.extend(self._take_all(timeout_seconds))
        events = [self._taken.popleft() for _ in range(int(min(self._most, len(self._taken))))]
        for event in events:
            if isinstance(event, PeerUp):
                self.hellos[event.peer] = event.hello
            elif isinstance(event, PeerDown):
                self.hellos.pop(event.peer, None)
        return events

    def _take_all(self, timeout_seconds: float) -> list[LinkEvent]:
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._woken or self._failure, timeout_seconds)
            if self._failure is not None:
                raise InvariantError("the link thread has died") from self._failure
            self._woken = False
            events = list(self._events.values())
            self._events, self._loads, self._unread_bytes = {}, {}, 0
        return events

"""The routers a worker talks to, when they hear of its load, and that it leaves.

`Load` is pushed, not scraped: at once to a router that has just come, else when it changed, at most every
`load_seconds`.
"""

from __future__ import annotations

from shared.effects import Send
from shared.messages import Draining, Load


class RouterSessions:
    """The routers with a session now, in the order they came."""

    def __init__(self, load_seconds: float):
        self._load_seconds = load_seconds
        self._told: dict[str, Load | None] = {}
        self._next_push = 0.0
        self.left = False  # the worker takes nothing new any more
        self._dismissed: set[str] = set()  # routers that send nothing new any more

    def join(self, router: str) -> list[Send]:
        """A router's session has begun; what it must hear at once."""
        self._told[router] = None
        self._next_push = 0.0
        return [Send(router, Draining())] if self.left else []

    def take_leave(self) -> list[Send]:
        """The worker takes nothing new from now on: all routers hear it."""
        self.left = True
        return [Send(router, Draining()) for router in self._told]

    def leave(self, router: str) -> None:
        """A router's session has ended."""
        self._told.pop(router, None)
        self._dismissed.discard(router)

    def dismiss(self, router: str) -> None:
        """The router knows that the worker leaves, and has nothing new on the way."""
        self._dismissed.add(router)

    @property
    def dismissed(self) -> bool:
        """Whether all routers are."""
        return self._dismissed >= self._told.keys()

    def due(self, now: float) -> bool:
        """Whether it is time to look at the load again."""
        return bool(self._told) and now >= self._next_push

    def deadline(self, load: Load) -> float | None:
        """When somebody is to hear of this load; None if all have."""
        return self._next_push if any(told != load for told in self._told.values()) else None

    def push(self, load: Load, now: float) -> list[Send]:
        """The messages to send; the next look is `load_seconds` from now."""
        self._next_push = now + self._load_seconds
        late = [router for router, told in self._told.items() if told != load]
        self._told.update(dict.fromkeys(late, load))
        return [Send(router, load) for router in late]

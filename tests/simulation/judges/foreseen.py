"""The oracle for what routers tell each other by way of decode workers: the pages of what they have begun for them.

- A worker tells a router the sum of what the other routers with a session have told last, and nothing of its own.
- A router that hears of others has told each worker what it has begun for it, no more and no less.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from decode.config import DecodeConfig
from decode.scheduler import DecodeScheduler
from router.core.dispatch import RouterCore
from shared.batch.effects import Send
from shared.links.events import LinkEvent, PeerDown, PeerUp, Received
from shared.wire.messages import Foreseen, Load


class JudgedForeseen(DecodeScheduler):
    """A decode worker. Each load is judged by the sessions that the judge has seen."""

    def __init__(self, config: DecodeConfig, *, pages: int, **rest: Any):
        super().__init__(config, pages=pages, **rest)
        self.judged: Counter[str] = Counter()
        self._told_by: dict[str, int] = {}  # pages, by each router with a session

    def on_link(self, event: LinkEvent, now: float) -> None:
        match event:
            case PeerUp(router, _):
                self._told_by[router] = 0
            case PeerDown(router, _):
                self._told_by.pop(router, None)
            case Received(router, Foreseen(pages)):
                self._told_by[router] = pages
        super().on_link(event, now)

    def tick(self, now: float) -> None:
        before = len(self._effects)
        super().tick(now)
        for effect in self._effects[before:]:
            if isinstance(effect, Send) and isinstance(effect.message, Load):
                others = [pages for router, pages in self._told_by.items() if router != effect.peer]
                expected = sum(others) if others else -1
                self.judged["a router hears what others have begun"] += expected > 0
                assert effect.message.pages_foreseen == expected, (
                    f"{effect.peer} hears of {effect.message.pages_foreseen} pages, expected {expected}"
                )


class ForeseenJudge:
    """What the workers of one router were told, in the sessions of now."""

    def __init__(self, core: RouterCore):
        self._core = core
        self._told: dict[object, int] = {}

    def settled(self) -> int:
        """The router has settled what came; returns how many workers know of something that is begun for them."""
        workers = self._core.fleet.workers
        for effect in self._core._effects:
            if isinstance(effect, Send) and isinstance(effect.message, Foreseen):
                self._told[workers[effect.peer]] = effect.message.pages
        count = 0
        for worker in workers.values():
            if worker.load.pages_foreseen < 0 or not worker.understands(Foreseen):
                continue  # it says nothing of others; or lies, for its version does not know of such pages
            live = self._core._requests.live.values()
            begun = sum(worker.foreseen[each.rid] for each in live if each.foreseen_at is worker)
            told = self._told.get(worker, 0)
            assert told == begun, f"{worker.peer} was told of {told} pages, and {begun} are begun for it"
            count += begun > 0
        return count

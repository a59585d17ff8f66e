"""How a process is: ready or not, what it does meanwhile, and when its main loop last turned.

Written by the main thread, read by whatever answers probes: a worker's probe server, the router's HTTP side.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from shared.primitives.loop_watch import LoopWatch


class Health:
    """The state that probes report; written by the main thread, read by the threads of the probes.

    A process is not ready at first. `doing` is what it does until then, `facts` what it chose (device, pages, …).
    """

    def __init__(self, loop_seconds_max: float, clock: Callable[[], float] = time.monotonic):
        self.loop_watch = LoopWatch(loop_seconds_max)
        self._clock = clock
        self._draining = False
        self.ready = False
        self.doing = "starting"
        self.facts: dict[str, str | int] = {}

    def beat(self) -> None:
        """The main loop runs; called in every turn. Before the first beat the process counts as alive."""
        self.loop_watch.turned(self._clock())

    def become_ready(self) -> None:
        """The process takes work: it is loaded and its self-fetch passed. A draining one stays unready."""
        if self._draining:
            return
        self.doing = "serving"
        self.ready = True

    def become_unready(self, why: str) -> None:
        """The process takes no new work, for this reason."""
        if not self._draining:
            self.ready, self.doing = False, why

    def start_draining(self) -> None:
        """The process takes no new work until it ends."""
        self._draining = True
        self.ready, self.doing = False, "draining"

    def alive(self) -> bool:
        """Whether the loop gets on, or is not running yet."""
        return not self.loop_watch.hangs(self._clock())

    def report(self) -> bytes:
        """The body of `/readyz`."""
        return msgspec.json.encode({"ready": self.ready, "doing": self.doing, "facts": self.facts})

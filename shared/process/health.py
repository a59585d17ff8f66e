"""How a process is: ready or not, what it does meanwhile, when its main loop last turned; and the pages that say so.

Written by the main thread, read by whatever answers probes: the admin port, the router's HTTP side. Pages of every
process's admin port:

    /livez     200 while the loop gets on, else 503: the kubelet, or `segue up`, then starts the process anew
    /readyz    200 while the process takes new work, else 503; what it does, and what it has chosen
    /metrics   what was published last, for Prometheus
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from shared.primitives.loop_watch import LoopWatch
from shared.process import gauges
from shared.process.admin_port import AdminPage, AnswerPath
from shared.process.metrics import Metrics

NOTHING_HERE = AdminPage(404, "text/plain", b"there is nothing at this path\n")


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

    def seconds_since_turn(self) -> float:
        """Seconds since the loop last turned; 0.0 before its first turn."""
        return self.loop_watch.seconds_since(self._clock())

    def report(self) -> bytes:
        """The body of `/readyz`."""
        return msgspec.json.encode({"ready": self.ready, "doing": self.doing, "facts": self.facts})


def probe_pages(health: Health, metrics: Metrics) -> AnswerPath:
    """Answers of a process whose loop publishes its metrics by itself."""
    metrics.set_at_scrape(gauges.LOOP_TURN_SECONDS, health.seconds_since_turn)

    async def answer(path: str, accept: str) -> AdminPage:
        if path == "/livez":
            alive = health.alive()
            return (
                AdminPage(200, "text/plain", b"ok\n")
                if alive
                else AdminPage(503, "text/plain", b"the loop hangs\n")
            )
        if path == "/readyz":
            return AdminPage(200 if health.ready else 503, "application/json", health.report())
        if path == "/metrics":
            return AdminPage(200, *metrics.page(accept), ((b"vary", b"accept"),))
        return NOTHING_HERE

    return answer

"""Where prompts wait for the time of decode workers: streams go to few of them, and the others compute prompts.

A step with rows that decode reads all weights, and so does the pass of a prompt beside them. Where the time between two
tokens is short, little of a step is left for prompts, and a worker without streams computes several times as many. So
while prompts wait and some decode worker has less than `SCARCE` of its time for them, streams go to the worker that has
most of them and room for one more, and a stream whose prompt a decode worker computes leaves it for that one, if that
one has as many. Without prompts that wait the policy of decode spreads them.

With `local_prefill: short` alone. A stream moves once: with its first token, as if prefill had computed it, or later
where few are left beside prompts that wait. One stream takes half of a worker's time for prompts where targets are
short, so the worker that has fewest is emptied, a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.config import RouterConfig
from router.core.fleet import placement
from router.core.fleet.prompt_seconds import PromptSeconds
from router.core.fleet.workers import Fleet, Worker
from router.core.queueing.balance import Balance
from router.core.requests.live_request import LiveRequest
from router.placement_policies import Placement

PAUSE_SECONDS = 0.5  # that a stream may stand still to make room
WAITING_SECONDS = 0.1  # that a worker needs for the prompts it has: fewer do not wait
LEAVING_STREAMS = 4  # streams that leave a worker at a time: each waits for the pages of those before it
SCARCE = 0.6  # of the rate at which the worker would compute prompts if nobody decoded


class StreamPacking:
    """Chooses decode workers for streams while prompts wait. `now` in seconds."""

    def __init__(self, settings: RouterConfig, fleet: Fleet, seconds: PromptSeconds, balance: Balance):
        self._settings = settings
        self._fleet = fleet
        self._seconds = seconds
        self._balance = balance

    def is_wanted(self, prompts_wait: Callable[[], bool]) -> bool:
        """Whether prompts wait, here or at a decode worker, and some worker has little time for them."""
        if self._settings.local_prefill != "short":
            return False
        workers = self._fleet.of_role("decode")
        if not any(_has_little_time(worker) for worker in workers):
            return False
        return any(_has_prompts_waiting(worker) for worker in workers) or prompts_wait()

    def to_empty(self, now: float) -> Worker | None:
        """The worker with fewest streams, of those that have little time for prompts that wait there; None: none.

        Nor one of a KV group in which no fetch was seen yet: what a stream would pause for is not known.
        """
        pressed = [
            worker
            for worker in self._fleet.of_role("decode")
            if _has_prompts_waiting(worker)
            and _has_little_time(worker)
            and _streams(worker)
            and self._seconds.fetched(worker.kv_group, 1, now) > 0
        ]
        return min(pressed, key=lambda worker: (_streams(worker), worker.arrival), default=None)

    def place(self, live: LiveRequest, workers: Sequence[Worker], now: float) -> Placement[Worker] | None:
        """The worker with most streams that has room for one more, but for the one that has its pages."""
        roomy = [
            worker
            for worker in placement.roomy(live.need, workers, self._settings, now)
            if worker is not live.waits_on and self._may_fill(worker)
        ]
        if not roomy:
            return None
        able = placement.preferred(live.need, roomy)
        best = max(able, key=lambda worker: (_streams(worker), -worker.arrival))
        return Placement(best, f"prompts wait, and it has most streams: {_streams(best)}", "packed")

    def place_elsewhere(
        self, live: LiveRequest, here: Worker, workers: Sequence[Worker], now: float
    ) -> Placement[Worker] | None:
        """The worker to which a stream goes behind its first token; None: it stays where its prompt is computed."""
        choice = self.place(live, workers, now)
        if choice is None or self._pause(live, choice.worker, now) > PAUSE_SECONDS:
            return None
        with_it = _streams(here) + (live.rid in here.extending)
        return choice if _streams(choice.worker) >= with_it else None

    def _may_fill(self, worker: Worker) -> bool:
        """Whether it may get more streams: not where balance is about to take some away."""
        return not self._balance.is_pressed(worker)

    def _pause(self, live: LiveRequest, worker: Worker, now: float) -> float:
        """Seconds until the worker has fetched the pages of the stream, as others of its KV group have lately."""
        return self._seconds.fetched(worker.kv_group, live.need.tokens, now)


def _has_little_time(worker: Worker) -> bool:
    return worker.load.extend_rate < SCARCE * worker.load.extend_rate_alone


def _has_prompts_waiting(worker: Worker) -> bool:
    return worker.tokens_waiting > WAITING_SECONDS * worker.load.extend_rate


def _streams(worker: Worker) -> int:
    """Requests at the worker but for those whose prompt it computes for this router."""
    return worker.requests - len(worker.extending)

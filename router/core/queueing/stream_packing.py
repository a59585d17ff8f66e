"""Where prompts wait for the time of decode workers: streams go to few of them, and the others compute prompts.

A step with rows that decode reads all weights, and so does the pass of a prompt beside them. Where the time between two
tokens is short, little of a step is left for prompts, and a worker without streams computes several times as many. So
while prompts wait and some decode worker has less than `SCARCE` of its time for them, streams go to the worker that has
most of them and room for one more, and a stream whose prompt a decode worker computes leaves it for that one, if that
one has as many. Without prompts that wait the policy of decode spreads them. Streams move within a KV group, so each is
looked at by itself: what waits are prompts of its model, and a worker that drains does not count.

With `local_prefill: short` alone. A stream moves once: with its first token, as if prefill had computed it, or later
where few are left beside prompts that wait. One stream takes half of a worker's time for prompts where targets are
short, so the worker that has fewest is emptied, a few at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.config import RouterConfig
from router.core.fleet import placement
from router.core.fleet.prompt_seconds import PromptSeconds
from router.core.fleet.worker import KvGroup, Worker
from router.core.fleet.workers import Fleet
from router.core.queueing.backpressure import Backpressure
from router.core.queueing.balance import Balance
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest
from router.core.requests.reservations import Reservations
from router.placement_policies import Placement

PAUSE_SECONDS = 0.5  # that a stream may stand still to make room
WAITING_SECONDS = 0.1  # that a worker needs for the prompts it has: fewer do not wait
LEAVING_STREAMS = 4  # streams that leave a worker at a time: each waits for the pages of those before it
FULL = 0.5  # of the pool of a worker that streams go to
SCARCE = 0.8  # of the rate at which the worker would compute prompts if nobody decoded
PROMPTS_LOOKED_AT = 64  # of those that wait at the router: whether any waits for the time of workers


@dataclass(slots=True)
class PromptTime:
    """The time for prompts of the decode workers of a KV group that do not drain, in one placement pass."""

    models: dict[str, None] = field(default_factory=dict)  # by name
    is_scarce: bool = False  # some worker has little of it
    is_awaited: bool = False  # some worker has prompts that wait for it
    pressed: list[Worker] = field(default_factory=list)  # workers of which both is true
    prompts: list[LiveRequest] | None = None  # that may wait for it at the router; None: not looked at yet

    def add(self, worker: Worker) -> None:
        """Count a worker of the KV group in."""
        has_little, has_waiting = _has_little_time(worker), _has_prompts_waiting(worker)
        self.models[worker.hello.model_name] = None
        self.is_scarce |= has_little
        self.is_awaited |= has_waiting
        self.pressed += [worker] if has_little and has_waiting else []


class StreamPacking:
    """Chooses decode workers for streams while prompts wait. `now` in seconds."""

    def __init__(
        self,
        settings: RouterConfig,
        fleet: Fleet,
        seconds: PromptSeconds,
        balance: Balance,
        backpressure: Backpressure,
        reservations: Reservations,
    ):
        self._settings = settings
        self._fleet = fleet
        self._seconds = seconds
        self._balance = balance
        self._backpressure = backpressure
        self._waiting = reservations.waiting
        self._times: dict[KvGroup, PromptTime] = {}

    def begin_pass(self) -> None:
        """Look at the workers anew. What they tell does not change within a pass; prompts are begun, see `begun`."""
        self._times = self._prompt_time()

    def begun(self, worker: Worker) -> None:
        """A prompt was given to the worker, and others may wait for its time now."""
        if worker.kv_group in self._times:
            self._times[worker.kv_group].is_awaited |= _has_prompts_waiting(worker)

    def is_wanted(self, kv_group: KvGroup, now: float, besides: LiveRequest | None = None) -> bool:
        """Whether prompts wait for workers of the KV group, some of which has little time for them.

        `besides`: a prompt that is about to be begun, and waits no more.
        """
        time = self._times.get(kv_group)
        if time is None or not time.is_scarce:
            return False
        if time.is_awaited:
            return True
        if time.prompts is None:
            time.prompts = self._waiting.first(PROMPTS_LOOKED_AT)
        prompts = time.prompts  # the last ones first: those in front of them are begun before
        while prompts and (prompts[-1] is besides or not self._waits_for(prompts[-1], kv_group, time, now)):
            prompts.pop()
        return bool(prompts)

    def to_empty(self, now: float) -> list[Worker]:
        """The worker with fewest streams in each KV group, where prompts wait for time of which it has little.

        None of a KV group in which no fetch was seen yet: what a stream would pause for is not known.
        """
        found = []
        for kv_group, time in self._times.items():
            able = [worker for worker in time.pressed if _streams(worker)]
            if able and self._seconds.fetched(kv_group, 1, now) > 0:
                found.append(min(able, key=lambda worker: (_streams(worker), worker.arrival)))
        return found

    def _prompt_time(self) -> dict[KvGroup, PromptTime]:
        """By KV group; nothing where streams do not make room for prompts."""
        found: dict[KvGroup, PromptTime] = {}
        if self._settings.local_prefill == "short":
            for worker in self._fleet.of_role("decode"):
                if not worker.draining:
                    found.setdefault(worker.kv_group, PromptTime()).add(worker)
        return found

    def _waits_for(self, live: LiveRequest, kv_group: KvGroup, time: PromptTime, now: float) -> bool:
        """Whether the prompt waits for nothing but the time of workers, and those of the KV group have its model."""
        return (
            live.state is RequestState.WAITING
            and live.need.model_name in time.models
            and live.need.model in ("", kv_group[0])
            and live.may_begin(self._settings.tenant_running_max, now)
            and not (live.tenant.begun[kv_group] and kv_group in self._backpressure.late_lanes(now))
        )

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
        """Whether it may get more streams: not where balance is about to take some away, or links are busy for long.

        Half of its pool is for its cache: what it fetches drives prefixes out that the prompts of others begin with.
        """
        is_full = worker.tokens > FULL * worker.pool_tokens
        return not (is_full or worker.seconds_to_fetch() > PAUSE_SECONDS or self._balance.is_pressed(worker))

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

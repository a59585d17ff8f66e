"""In how many seconds a worker would have computed a prompt, and decode have its pages.

    (tokens queued there + w x tokens not cached there) / extend_rate + what their positions add  either worker
    + (tokens that decode has to fetch) x seconds a fetched token                                  of prefill

w is `cache_miss_weight`: what is computed anew drives something else out of a cache, and a prefix that is in few of
them leaves room for others.

Rates are what workers tell (`Load`). One that has told none yet is taken to be as fast as the last of its model that
has: it could tell nothing before its first prompt. What a fetch costs is what a router sees of fetches of a KV group,
from its command to `Joined`, so that a slow link and a line in front of it count for what they take.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import inf

from router.core.fleet.workers import KvGroup, Worker
from shared.scheduling.step_cost import ExtendRate, sum_of_positions

KEPT = 0.95  # of what earlier fetches tell, with each new one
GROUPS_MAX = 64  # models and KV groups of which anything is remembered


@dataclass(slots=True)
class Fetched:
    """Sums over the last fetches of a KV group."""

    tokens: float = 0.0
    seconds: float = 0.0


class PromptSeconds:
    """Estimates of one router."""

    def __init__(self, miss_weight: float) -> None:
        self._miss_weight = miss_weight
        self._rates: OrderedDict[str, ExtendRate] = OrderedDict()  # told last, by name of the model
        self._fetched: OrderedDict[KvGroup, Fetched] = OrderedDict()

    def computed(self, worker: Worker, tokens: int, cached: int) -> float:
        """Seconds until `worker` has computed a prompt of so many tokens, some of them cached; a weighted sum.

        Infinite where no rate is known.
        """
        rate = self._rate(worker)
        if not rate.tokens_per_second:
            return inf
        queued = worker.tokens if worker.hello.role == "prefill" else worker.tokens_waiting
        seconds = (queued + self._miss_weight * (tokens - cached)) / rate.tokens_per_second
        return seconds + rate.position_seconds * sum_of_positions(cached, tokens - cached)

    def fetched(self, kv_group: KvGroup, tokens: int) -> float:
        """Seconds until a decode worker of the KV group has fetched the pages of so many tokens; 0.0: not known."""
        seen = self._fetched.get(kv_group)
        return tokens * seen.seconds / seen.tokens if seen is not None and seen.tokens else 0.0

    def observe_fetch(self, kv_group: KvGroup, tokens: int, seconds: float) -> None:
        """Learn from a fetch of the pages of so many tokens."""
        if tokens <= 0:
            return
        seen = self._fetched.setdefault(kv_group, Fetched())
        seen.tokens = KEPT * seen.tokens + tokens
        seen.seconds = KEPT * seen.seconds + seconds
        self._fetched.move_to_end(kv_group)
        if len(self._fetched) > GROUPS_MAX:
            self._fetched.popitem(last=False)

    def _rate(self, worker: Worker) -> ExtendRate:
        """The worker's own rate, or the one that was told last for its model."""
        model, load = worker.hello.model_name, worker.load
        if not load.extend_rate:
            return self._rates.get(model, ExtendRate())
        rate = self._rates[model] = ExtendRate(load.extend_rate, load.position_seconds)
        self._rates.move_to_end(model)
        if len(self._rates) > GROUPS_MAX:
            self._rates.popitem(last=False)
        return rate

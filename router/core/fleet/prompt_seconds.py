"""In how many seconds a worker would have computed a prompt, and decode have its pages.

    (tokens queued there + w x tokens not cached there) / extend_rate + what their positions add  either worker
    + two steps and a twentieth of the time for which its streams wait                            of decode
    + seconds a fetch, and for each token that decode has to fetch                                of prefill

w is `cache_miss_weight`: what is computed anew drives something else out of a cache, and a prefix that is in few of
them leaves room for others.

Rates are what workers tell (`told_rates`). What a fetch costs is what a router sees of fetches of a KV group, from its
command to `Joined`, so that a slow link and a line in front of it count for what they take. It is forgotten while there
are none: where fetches were slow nothing travels that would show that they are not.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import inf, isinf
from typing import NamedTuple

from router.core.fleet.worker import KvGroup, Worker
from shared.scheduling.step_cost import sum_of_positions

KEPT = 0.95  # of what earlier fetches tell, with each new one
STEPS = 2  # of streams that a prompt beside them waits for: the one under way, and that of its own pass
STREAM_WEIGHT = 0.05  # of a second that a stream waits for a pass, by one that a prompt waits
FORGOTTEN_SECONDS = 30.0  # without a fetch, until half is left of what fetches are expected to take
ALIKE = 1e-3  # squared, of the mean: tokens that differ by less say nothing of what each fetch takes
GROUPS_MAX = 64  # KV groups whose fetches are remembered


class Ways(NamedTuple):
    """Seconds in which decode is foreseen to have a prompt, by each way; infinite: by nobody, or no rate is told."""

    decode: float
    prefill: float

    def __str__(self) -> str:
        here, there = ("not known" if isinf(each) else f"{each:.3f} s" for each in self)
        return f"foreseen at decode: {here}, by way of prefill: {there}"


@dataclass(slots=True)
class Fetched:
    """Sums over the last fetches of a KV group: what the least squares of seconds by tokens need."""

    count: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0  # tokens²
    products: float = 0.0  # tokens x seconds
    seen_at: float = 0.0  # the last one

    def add(self, tokens: int, seconds: float, now: float) -> None:
        """One more; the others count for less."""
        self.seen_at = now
        self.count = KEPT * self.count + 1
        self.tokens = KEPT * self.tokens + tokens
        self.seconds = KEPT * self.seconds + seconds
        self.squares = KEPT * self.squares + tokens * tokens
        self.products = KEPT * self.products + tokens * seconds

    def of(self, tokens: int, now: float) -> float:
        """Seconds of a fetch of so many tokens: a part that each fetch takes, and one for each token.

        Without fetches it is forgotten: where they were slow nothing travels, and nothing else would tell.
        """
        if not self.tokens:
            return 0.0
        spread = self.count * self.squares - self.tokens**2
        by_token = self.seconds / self.tokens  # where all were alike, all of it is by token
        if spread > ALIKE * self.tokens**2:
            slope = (self.count * self.products - self.tokens * self.seconds) / spread
            by_token = min(by_token, max(0.0, slope))
        seconds = (self.seconds - by_token * self.tokens) / self.count + by_token * tokens
        return float(seconds * 0.5 ** ((now - self.seen_at) / FORGOTTEN_SECONDS))


class PromptSeconds:
    """Estimates of one router."""

    def __init__(self, miss_weight: float) -> None:
        self._miss_weight = miss_weight
        self._fetched: OrderedDict[KvGroup, Fetched] = OrderedDict()

    def computed(self, worker: Worker, tokens: int, cached: int) -> float:
        """Seconds until `worker` has computed a prompt of so many tokens, some of them cached; a weighted sum.

        Infinite where no rate is known.
        """
        load, decodes = worker.load, worker.hello.role == "decode"
        per_second, position_seconds = worker.rates.rate(worker.hello, load)
        if not per_second:
            return inf
        new, queued = tokens - cached, worker.tokens_left if decodes else worker.tokens
        seconds = (queued + self._miss_weight * new) / per_second
        seconds += position_seconds * sum_of_positions(cached, new)
        beside = decodes and worker.running > 0
        return seconds + (_beside_streams(worker, new, per_second) if beside else 0.0)

    def weight(self, worker: Worker, tokens: int, cached: int) -> float:
        """What is in `computed` beside the seconds that are foreseen: the cost of the prompt to others."""
        per_second = worker.rates.rate(worker.hello, worker.load).tokens_per_second
        if not per_second:
            return 0.0
        weight = (self._miss_weight - 1) * (tokens - cached) / per_second
        beside = worker.hello.role == "decode" and worker.running > 0
        return weight + (_cost_to_streams(worker, tokens - cached, per_second) if beside else 0.0)

    def fetched(self, kv_group: KvGroup, tokens: int, now: float) -> float:
        """Seconds until a decode worker of the KV group has fetched the pages of so many tokens; 0.0: not known."""
        seen = self._fetched.get(kv_group)
        return seen.of(tokens, now) if seen is not None else 0.0

    def observe_fetch(self, kv_group: KvGroup, tokens: int, seconds: float, now: float) -> None:
        """Learn from a fetch of the pages of so many tokens."""
        if tokens <= 0:
            return
        self._fetched.setdefault(kv_group, Fetched()).add(tokens, seconds, now)
        self._fetched.move_to_end(kv_group)
        if len(self._fetched) > GROUPS_MAX:
            self._fetched.popitem(last=False)


def _beside_streams(worker: Worker, tokens: int, per_second: float) -> float:
    """Seconds that streams cost a prompt of so many tokens, and a small part of what the prompt costs them."""
    return STEPS * worker.load.step_seconds + _cost_to_streams(worker, tokens, per_second)


def _cost_to_streams(worker: Worker, tokens: int, per_second: float) -> float:
    alone = tokens / (worker.load.extend_rate_alone or per_second)
    return STREAM_WEIGHT * worker.running * alone

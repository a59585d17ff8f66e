"""How many more pages the requests of a decode worker will take: what admission expects of them.

    KV now ──► KV in 16 steps ──► in 32 ──► … : each request one token more a step, or none any more
                      └─ the most of these, less what is held now, is the growth to keep free (`ExpectedGrowth`)

Each request still runs in a number of steps by the share of outputs that come as far (`OutputLengths`). Those that end
give back what they hold, so in a steady state little is kept free, and much when many requests are young. The peak of
what is held, instead of the sum of all lengths, is the rule of the Past-Future scheduler (Gong et al., 2025,
arXiv:2507.10150).

Until enough outputs have ended on a worker, `NewTokenRatio` guesses how much of their `max_new_tokens` requests will
use. The rule and its constants are SGLang's (schedule_policy.py). `StepRate` says how many steps fit in a time.

Many requests may come between two steps. A sum over all that are here, for each of them, would make a burst cost the
square of its size. So a sum is cached, and those that come in are added to it, until it is invalidated (`CachedSum`).

This file counts tokens and steps. It knows no pages, and decides nothing. The same calls in the same order give the
same numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul
from typing import Generic, TypeVar

from shared.batch.req import Req
from shared.primitives.errors import InvariantError

STEPS_AHEAD = tuple(steps << power for power in range(9) for steps in (16, 24))  # 16 … 6,144
ALL_REACH = [1.0] * len(STEPS_AHEAD)

SEEN_MIN = 8  # outputs that must have ended before the histogram is used
OUTPUTS_REMEMBERED = 1024  # then all counts are halved, so that old outputs are forgotten
_EDGES: list[int] = [
    *range(4),
    *(quarter << power for power in range(18) for quarter in (4, 5, 6, 7)),
    1 << 20,
]


def _place(length: int) -> tuple[int, float]:
    """The bucket of a length, and the share of the bucket that lies below."""
    bucket = bisect_right(_EDGES, length) - 1
    if bucket + 1 == len(_EDGES):
        return bucket, 1.0
    low, high = _EDGES[bucket], _EDGES[bucket + 1]
    return bucket, (length - low) / (high - low)


# For each bucket the places of its middle, and of what lies each of `STEPS_AHEAD` beyond.
_PLACES = [
    [_place((low + high) // 2 + steps) for steps in (0, *STEPS_AHEAD)]
    for low, high in pairwise([*_EDGES, 2 * _EDGES[-1]])
]

RETURN_SECONDS = 10.0  # of ended requests whose pages count for the rate at which they come back
STEPS_MEASURED = 32  # the last ones; a pause among them makes the rate too low for as many steps

Sum = TypeVar("Sum")


@dataclass(slots=True)
class _AgeGroup:
    """Requests of like age, told apart by how many of `STEPS_AHEAD` end before their bound."""

    rest: int = 0  # tokens that they may still generate, of each no more than the guess counts
    counts: list[int] = field(default_factory=lambda: [0] * (len(STEPS_AHEAD) + 1))
    held: list[int] = field(default_factory=lambda: [0] * (len(STEPS_AHEAD) + 1))  # KV tokens


class ExpectedGrowth:
    """The growth of some requests by `lengths`, in tokens; by `ratio` alone until these are known.

    Requests whose outputs are in one bucket of `lengths` are one group, since nothing tells them apart.
    """

    def __init__(self, lengths: OutputLengths, steps_certain: int, clip: int, ratio: float):
        self.known = lengths.known
        self._lengths = lengths
        self._steps_certain = steps_certain  # in these all are expected to run on
        self._clip = clip
        self._ratio = ratio
        self._shares: dict[int, list[float]] = {}  # by bucket
        self._held = [0.0] * len(STEPS_AHEAD)  # KV tokens by then, less those of today
        self._certain = 0  # growth in `steps_certain`
        self._guessed = 0.0  # growth of requests that are longer than all outputs seen

    @property
    def tokens(self) -> float:
        """The most that all together will hold, less what they hold now."""
        return max(self._certain, *self._held) + self._guessed if self.known else self._guessed

    def tokens_with(self, req: Req) -> float:
        """`tokens` if this request came in, too. It is not added."""
        before = list(self._held), self._certain, self._guessed
        self.add([req])
        tokens = self.tokens
        self._held, self._certain, self._guessed = before
        return tokens

    def add(self, reqs: Iterable[Req]) -> None:
        """Expect these requests to grow, too."""
        if not self.known:
            self._guessed += self._ratio * sum(min(req.remaining_new_tokens, self._clip) for req in reqs)
            return
        steps_certain, clip = self._steps_certain, self._clip
        groups: dict[tuple[int, bool], _AgeGroup] = {}
        for req in reqs:
            tokens, params = len(req.token_ids), req.params
            output_len = tokens - req.prompt_len
            rest = params.max_new_tokens - output_len
            self._certain += rest if rest < steps_certain else steps_certain
            key = bisect_right(_EDGES, output_len) - 1, params.ignore_eos
            group = groups.get(key)
            if group is None:
                group = groups[key] = _AgeGroup()
            steps = bisect_left(STEPS_AHEAD, rest)
            group.rest += rest if rest < clip else clip
            group.counts[steps] += 1
            group.held[steps] += tokens - req.cached_len
        for (bucket, to_bound), group in groups.items():
            self._add_group(group, ALL_REACH if to_bound else self._shares_going_on(bucket))

    def _add_group(self, group: _AgeGroup, shares: list[float]) -> None:
        """Add a group of which such `shares` run on in each of `STEPS_AHEAD`, none beyond its bound; []: not known."""
        if not shares:
            self._guessed += group.rest * self._ratio
            return
        now = sum(group.held)
        count = held = 0  # of those whose bound lies behind a step
        for number in reversed(range(len(STEPS_AHEAD))):
            count += group.counts[number + 1]
            held += group.held[number + 1]
            self._held[number] += (held + count * STEPS_AHEAD[number]) * shares[number] - now

    def _shares_going_on(self, bucket: int) -> list[float]:
        if bucket not in self._shares:
            self._shares[bucket] = self._lengths.shares_going_on(bucket)
        return self._shares[bucket]


class OutputLengths:
    """The lengths of the outputs of one worker, in tokens: a decayed histogram, and the share that reaches a length.

    Lengths fall into four buckets for each power of two. Each bucket counts the outputs that came no further, and which
    of these ended there by themselves. An output that ended at its bound is not one of the latter (the estimator of
    Kaplan and Meier, 1958).
    """

    def __init__(self) -> None:
        self._seen = 0.0  # outputs, as far as they are remembered
        self._last = [0.0] * len(_EDGES)  # outputs by the bucket of their length
        self._ended = [0.0] * len(_EDGES)  # those that ended by themselves
        self._survival: list[float] = []  # the share of outputs that come to each edge; made when asked for

    @property
    def known(self) -> bool:
        """Whether enough outputs have ended."""
        return self._seen >= SEEN_MIN

    def add(self, length: int, *, at_bound: bool) -> None:
        """An output of `length` tokens has ended, by itself or `at_bound`."""
        bucket = bisect_right(_EDGES, length) - 1
        self._seen += 1
        self._last[bucket] += 1
        self._ended[bucket] += not at_bound
        if self._seen > OUTPUTS_REMEMBERED:
            self._seen /= 2
            self._last = [count / 2 for count in self._last]
            self._ended = [count / 2 for count in self._ended]
        self._survival = []

    def shares_going_on(self, bucket: int) -> list[float]:
        """Shares of outputs of such a length that go on for each of `STEPS_AHEAD`; [] if none came so far."""
        here, *ahead = self._shares_at(_PLACES[bucket])
        return [share / here for share in ahead] if here > 0 else []

    def _shares_at(self, places: Sequence[tuple[int, float]]) -> list[float]:
        survival = self._survival = self._survival or self._survived()
        return [
            survival[bucket] + (survival[bucket + 1] - survival[bucket]) * part for bucket, part in places
        ]

    def _survived(self) -> list[float]:
        reached = [*accumulate(reversed(self._last))][::-1]
        goes_on = (1 - e / r if r else 0.0 for e, r in zip(self._ended, reached, strict=True))
        return list(accumulate(goes_on, mul, initial=1.0))


class NewTokenRatio:
    """The share of the output still allowed that requests are expected to use: a congestion window for KV memory.

    Falls linearly while all goes well, to `min_factor` of its start over `decay_steps` decode steps, and jumps up
    when a retraction proves it too low.
    """

    def __init__(
        self,
        *,
        init: float,
        conservativeness: float,
        min_factor: float,
        decay_steps: int,
        headroom_steps: int,
    ):
        self._headroom_steps = headroom_steps  # decode steps that fit after a retraction
        self._init = min(1.0, init * conservativeness)
        self._least = self._init * min_factor
        self._decay = (self._init - self._least) / decay_steps
        self.value = self._init

    def decay(self) -> None:
        """A decode step went well."""
        self.value = max(self._least, self.value - self._decay)

    def after_retraction(self, output_lens: Sequence[int], max_new_tokens: Sequence[int]) -> None:
        """Set to what the requests that stayed have used, and will after the steps that now fit."""
        used = sum(output_lens) + self._headroom_steps * len(output_lens)
        self.value = min(1.0, used / (sum(max_new_tokens) + 1))

    def reset(self) -> None:
        """No request is left: start over."""
        self.value = self._init


class PagesReturned:
    """Pages that ended requests give back in a second, over the last `RETURN_SECONDS`."""

    def __init__(self) -> None:
        self._returned: deque[tuple[float, int]] = deque()  # seconds and pages

    def add(self, pages: int, now: float) -> None:
        """A request has ended that held so many."""
        self._returned.append((now, pages))

    def per_second(self, now: float) -> float:
        """The rate, to two digits: a router is told when it changes."""
        while self._returned and self._returned[0][0] <= now - RETURN_SECONDS:
            self._returned.popleft()
        pages = sum(pages for _, pages in self._returned)
        return float(f"{pages / RETURN_SECONDS:.2g}")


class StepRate:
    """The rate of the last `STEPS_MEASURED` steps."""

    def __init__(self) -> None:
        self._planned_at: deque[float] = deque(maxlen=STEPS_MEASURED + 1)  # seconds

    def on_step(self, now: float) -> None:
        """A step is planned."""
        self._planned_at.append(now)

    def steps_within(self, seconds: float, most: int) -> int:
        """Steps that fit in `seconds`, and no more than `most`; that many until two steps have been seen."""
        steps = len(self._planned_at) - 1
        if steps < 1 or self._planned_at[-1] <= self._planned_at[0]:
            return most
        return min(most, math.ceil(seconds * steps / (self._planned_at[-1] - self._planned_at[0])))


@dataclass(slots=True)
class CachedSum(Generic[Sum]):
    """One sum over the requests that are here, kept from one admission to the next."""

    reqs: Callable[[], Sequence[Req]]  # that are here; asked only for a sum that is made anew
    empty: Callable[[], Sum]  # the sum over no requests
    plus: Callable[[Sum, Sequence[Req]], Sum]  # a sum with some more requests
    _sum: Sum | None = None

    def get(self) -> Sum:
        """The cached sum, or a new one if none is cached."""
        if self._sum is None:
            self._sum = self.plus(self.empty(), self.reqs())
        return self._sum

    def add(self, req: Req) -> None:
        """Add a request that has come. A sum that is made later finds the request among `reqs`."""
        if self._sum is not None:
            self._sum = self.plus(self._sum, [req])

    def invalidate(self) -> None:
        """Make the next sum anew."""
        self._sum = None

    def check(self) -> None:
        """Prove that a cached sum is what the requests add up to; raises `InvariantError`."""
        if self._sum is not None and self._sum != (fresh := self.plus(self.empty(), self.reqs())):
            raise InvariantError(
                f"a sum over {len(self.reqs())} requests is kept as {self._sum}, but it is {fresh}"
            )

"""What workers tell of how fast they compute prompts, and how much of that counts.

None counts for more than `FASTEST` times the median of its model and role: one worker of three or more that tells more
would get all prompts, and is mistaken. Of two neither is the middle one, so one counts for no more than `FASTEST`²
times what the other tells. Where as many are fast as are slow the median is a fast one's: a slow worker gets few
prompts, so it never tells anything else. A worker that is gone does not count, and one that came back counts once: else
whoever comes often enough is the median. Learnt from loads, not as workers are compared, which is done for each prompt
and worker in each placement pass.

One that has told none yet is taken to be as fast as those are in the middle, if nobody decoded there: it could tell
nothing before its first prompt. However much a position is told to add, what the last position of a context adds to it
is no more than `FASTEST` times what a token takes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf

from shared.scheduling.step_cost import ExtendRate
from shared.wire.messages import Hello, Limits, Load

FASTEST = 16  # times the median rate of a model and role
TELLERS_MAX = 16  # workers of a model and role whose rates are remembered, for the median
RATES_MAX = 128  # models and roles of which anything is remembered
NOT_KNOWN = ExtendRate()


@dataclass(slots=True)
class ToldRates:
    """What workers of a model and role told last, beside no streams."""

    median: ExtendRate = NOT_KNOWN
    most: float = inf  # that counts of any rate
    # of the last tellers, by uid: the session that told, and what
    tellers: OrderedDict[str, tuple[str, ExtendRate]] = field(default_factory=OrderedDict)

    def add(self, uid: str, peer: str, rate: ExtendRate) -> None:
        """A worker tells this."""
        if self.tellers.get(uid) != (peer, rate):
            self.tellers[uid] = (peer, rate)
            self.tellers.move_to_end(uid)
            if len(self.tellers) > TELLERS_MAX:
                self.tellers.popitem(last=False)
            self._compare()

    def remove(self, uid: str, peer: str) -> None:
        """A session of a worker is over, which may have begun another one."""
        if self.tellers.get(uid, ("", NOT_KNOWN))[0] == peer:
            del self.tellers[uid]
            self._compare()

    def _compare(self) -> None:
        rates = sorted(rate.tokens_per_second for _, rate in self.tellers.values())
        positions = sorted(rate.position_seconds for _, rate in self.tellers.values())
        count = len(rates)
        if not rates:
            self.median, self.most = NOT_KNOWN, inf
            return
        middle = rates[count // 2]
        self.most = FASTEST * (FASTEST * rates[0] if count == 2 else middle)
        self.median = ExtendRate(min(middle, self.most), positions[(count - 1) // 2])


class FleetRates:
    """What the workers of a fleet told."""

    def __init__(self) -> None:
        self._rates: OrderedDict[tuple[str, str], ToldRates] = OrderedDict()  # by model and role

    def told(self, peer: str, hello: Hello, load: Load) -> None:
        """A worker reports this load."""
        if not load.extend_rate:
            return
        of = (hello.model_name, hello.role)
        alone = load.extend_rate_alone or load.extend_rate
        self._rates.setdefault(of, ToldRates()).add(hello.uid, peer, ExtendRate(alone, load.position_seconds))
        self._rates.move_to_end(of)
        if len(self._rates) > RATES_MAX:
            self._rates.popitem(last=False)

    def down(self, peer: str, hello: Hello) -> None:
        """A worker is gone."""
        of = (hello.model_name, hello.role)
        if (told := self._rates.get(of)) is not None:
            told.remove(hello.uid, peer)
            if not told.tellers:
                del self._rates[of]

    def rate(self, hello: Hello, load: Load) -> ExtendRate:
        """The worker's own rate, or that of the others of its model: of its role, if any has told one."""
        told = self._rates.get((hello.model_name, hello.role))
        if load.extend_rate:
            if told is None or load.extend_rate <= told.most:
                return ExtendRate(load.extend_rate, load.position_seconds)
            return ExtendRate(told.most, load.position_seconds)
        if told is None:
            told = self._rates.get((hello.model_name, "prefill" if hello.role == "decode" else "decode"))
        return _possible(told.median, hello.limits) if told is not None else NOT_KNOWN


def _possible(rate: ExtendRate, limits: Limits) -> ExtendRate:
    """The rate for a worker that has not told it, and could hardly show that another one has told too much."""
    context = limits.context_len or limits.pages * limits.page_size
    most = FASTEST / (rate.tokens_per_second * context) if context else 0.0
    return ExtendRate(rate.tokens_per_second, min(rate.position_seconds, most))

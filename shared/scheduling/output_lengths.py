"""How long outputs become, by those that have ended: a decayed histogram, and the share of outputs that reach a length.

It knows only numbers, no request and no pool. Lengths fall into four buckets for each power of two. For each bucket it
counts the outputs that came as far, and those that ended there by themselves. An output that ended at its bound counts
among the first and not among the second (the estimator of Kaplan and Meier, 1958). The same lengths in
the same order give the same answers.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from operator import mul

SEEN_MIN = 8  # outputs that must have ended before the histogram is used
OUTPUTS_REMEMBERED = 1024  # then all counts are halved, so that old outputs are forgotten
_EDGES: list[int] = [
    *range(4),
    *(quarter << power for power in range(18) for quarter in (4, 5, 6, 7)),
    1 << 20,
]


class OutputLengths:
    """The lengths of the outputs of one worker, in tokens."""

    def __init__(self) -> None:
        self._reached = [0.0] * len(_EDGES)
        self._ended = [0.0] * len(_EDGES)
        self._survival: list[float] = []  # the share of outputs that come to the edge; made when asked for

    @property
    def known(self) -> bool:
        """Whether enough outputs have ended."""
        return self._reached[0] >= SEEN_MIN

    def add(self, length: int, *, at_bound: bool) -> None:
        """An output of `length` tokens has ended, by itself or `at_bound`."""
        last = bisect_right(_EDGES, length) - 1
        for bucket in range(last + 1):
            self._reached[bucket] += 1
        self._ended[last] += not at_bound
        if self._reached[0] > OUTPUTS_REMEMBERED:
            self._reached = [count / 2 for count in self._reached]
            self._ended = [count / 2 for count in self._ended]
        self._survival = []

    def share_reaching(self, length: float) -> float:
        """The share of outputs that come to `length` tokens; 0 beyond all that were seen."""
        bucket = bisect_right(_EDGES, length) - 1
        if bucket + 1 >= len(_EDGES):
            return 0.0
        low, high = _EDGES[bucket], _EDGES[bucket + 1]
        self._survival = self._survival or self._survived()
        here, there = self._survival[bucket], self._survival[bucket + 1]
        return here + (there - here) * (length - low) / (high - low)

    def _survived(self) -> list[float]:
        goes_on = (1 - e / r if r else 0.0 for e, r in zip(self._ended, self._reached, strict=True))
        return list(accumulate(goes_on, mul, initial=1.0))[:-1]

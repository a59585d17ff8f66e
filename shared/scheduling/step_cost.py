"""What a step costs on this worker's device, learnt from the steps that it has computed.

    seconds = d(rows) + f + e0 · tokens + e1 · sum of their positions      rows of DECODE, tokens of prompts

`d` is an average for each bucket of rows. `f`, a pass of EXTEND, and `e0` and `e1`, a token and its position, are a
least-squares fit of what steps took beyond `d`. Both forget: contexts grow, and cores get busy with other things. All
are seconds of the device (`Sampled.seconds`), for a clock of the loop would count its planning.

The fit never calls a cost negative. Where steps do not tell costs apart, as when all have the same length, it ascribes
what it can to `e0`, so that it expects too much of longer steps rather than too little. No step is known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations
from typing import NamedTuple

DECODE_STEPS = 32  # of a bucket, that its average remembers
EXTEND_STEPS = 200  # that the fit remembers
FIRST_WEIGHT = 1 / 16  # of the first pass, which finds everything cold, once there is another
LEAST_TOKENS, SMALL_TOKENS = 16, 64  # of the least pass; and at most of those that tell what it takes
LEAST_WEIGHT, LARGER_WEIGHT = 1 / 4, 1 / 64  # how much they tell; and how much a larger pass that took less
LEAST_FACTOR = 2  # of what is known: no pass tells more or less than that
LEAST_KEPT = 0.97  # of what it takes, where it is not tried
HICCUP = 8  # times what was expected: no step teaches more
_RIDGE = (1e-6, 0.0, 1e-6)  # of each column's own sum of squares: what is not told apart goes to `e0`

Vector = list[float]


class ExtendCost(NamedTuple):
    """Seconds of a pass of EXTEND."""

    fixed: float  # f
    token: float  # e0
    position: float  # e1: of a token, for each token before it

    def seconds(self, start: int, tokens: int) -> float:
        """A pass over `tokens` of one prompt, from position `start` on."""
        return self.fixed + self.token * tokens + self.position * sum_of_positions(start, tokens)


class ExtendRate(NamedTuple):
    """How fast steps compute prompts, as `Load` tells it; all 0.0: not known."""

    tokens_per_second: float = 0.0  # from the first token of a prompt on
    position_seconds: float = 0.0  # that a token takes longer for each token before it


class LeastPass:
    """What a pass of EXTEND takes however few its tokens: a GPU reads all weights for one, too.

    The fit does not show it, for passes that compute for longer than they read are on a line through 0. Passes of up to
    `SMALL_TOKENS` teach, and until there was one, the smallest that there was. A larger one teaches only if it took
    less, and little: of a noisy device some always do.
    """

    def __init__(self) -> None:
        self._seconds, self._tokens = 0.0, math.inf

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a pass."""
        size, known = max(tokens, SMALL_TOKENS), self._seconds
        if size < self._tokens or (not known and size == self._tokens):
            self._seconds = min(known, seconds) if known else seconds
            self._tokens = size
            return
        told = min(max(seconds, known / LEAST_FACTOR), known * LEAST_FACTOR)
        if size == self._tokens:
            self._seconds += (told - known) * LEAST_WEIGHT
        elif told < known:
            self._seconds += (told - known) * LARGER_WEIGHT

    def of(self, tokens: int) -> float:
        """Seconds of a pass of so many tokens at least; 0.0 where none of so few was seen."""
        return self._seconds if self._tokens <= max(tokens, SMALL_TOKENS) else 0.0

    def doubt(self) -> None:
        """Such passes are not tried any more: in the end one is, for they may have got faster."""
        self._seconds *= LEAST_KEPT


class StepCost:
    """The costs of one device."""

    def __init__(self) -> None:
        self._decode: dict[int, tuple[int, float]] = {}  # by bucket of rows: steps counted, and their average
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._moments = [0.0] * 3
        self._fit: ExtendCost | None = None  # until another step is observed
        self.least = LeastPass()

    def observe_decode(self, rows: int, seconds: float) -> None:
        """Learn from a step of DECODE. One whose seconds are not known, 0.0, teaches nothing."""
        if seconds <= 0 or rows <= 0:
            return
        bucket = _bucket(rows)
        steps, average = self._decode.get(bucket, (0, 0.0))
        steps = min(steps + 1, DECODE_STEPS)
        self._decode[bucket] = steps, average + (seconds - average) / steps

    def observe_extend(self, rows: int, prompts: Iterable[tuple[int, int]], seconds: float) -> None:
        """Learn from a step over `prompts`, each its first position and its tokens, beside `rows` that decode.

        Beside rows of which nothing is known it teaches nothing.
        """
        if seconds <= 0 or (rows and not self._decode):
            return
        pairs = list(prompts)
        tokens = sum(count for _, count in pairs)
        positions = sum(sum_of_positions(start, count) for start, count in pairs)
        step, beyond = (1.0, float(tokens), float(positions)), max(0.0, seconds - self.decode_seconds(rows))
        known = self.extend or ExtendCost(0.0, 0.0, 0.0)
        expected = known.fixed + known.token * tokens + known.position * positions
        if expected:  # a process that stood still has not told what tokens cost
            beyond = min(beyond, HICCUP * expected)
        told = beyond
        if tokens <= SMALL_TOKENS:  # a device without much that is fixed computes a page sooner
            told -= known.token * max(0, tokens - LEAST_TOKENS) + known.position * positions
        self.least.observe(tokens, max(0.0, told))
        passes = self._squares[0][0]  # that count, the older ones for less
        kept = FIRST_WEIGHT if passes == 1.0 else 1 - 1 / EXTEND_STEPS
        for at, value in enumerate(step):
            self._squares[at] = [
                kept * old + value * other for old, other in zip(self._squares[at], step, strict=True)
            ]
            self._moments[at] = kept * self._moments[at] + value * beyond
        self._fit = None

    def knows_decode(self, rows: int) -> bool:
        """Whether a step that only decodes so many rows, or about as many, has been seen."""
        return _bucket(rows) in self._decode

    def decode_seconds(self, rows: int) -> float:
        """`d`: of a step that only decodes. Where no such step was seen, that of a nearby bucket.

        For more rows than were ever seen it is that of the most: too little rather than too much, for what is left of a
        step's time goes to prompts.
        """
        if not rows or not self._decode:
            return 0.0
        bucket = _bucket(rows)
        larger = [known for known in self._decode if known >= bucket]
        return self._decode[min(larger) if larger else max(self._decode)][1]

    def extend_rate(self, rows: int, tokens: int, every: int = 1) -> ExtendRate:
        """The rate of steps of which one of `every` computes `tokens` of prompts, beside `rows` that decode."""
        extend = self.extend
        seconds = extend.seconds(0, tokens) if extend is not None else 0.0
        if extend is None or not seconds:
            return ExtendRate()
        step_seconds = seconds + every * self.decode_seconds(rows)
        return ExtendRate(
            two_digits(tokens / step_seconds), two_digits(extend.position * step_seconds / seconds)
        )

    @property
    def extend(self) -> ExtendCost | None:
        """`f`, `e0` and `e1`; None: no step has told yet."""
        if self._fit is None and self._squares[0][0]:
            self._fit = ExtendCost(*_fitted(self._squares, self._moments))
        return self._fit


def two_digits(value: float) -> float:
    """The value to two digits: a load is told when it has changed, and no rate is known better."""
    return float(f"{value:.2g}")


def sum_of_positions(start: int, tokens: int) -> int:
    """The sum of the positions of so many tokens, from `start` on."""
    return tokens * start + tokens * (tokens - 1) // 2


def _bucket(rows: int) -> int:
    """The most rows of their bucket: buckets are at most a quarter wide."""
    width = 1 << max(0, rows.bit_length() - 3)
    return -(-rows // width) * width


def _fitted(squares: list[Vector], moments: Vector) -> Vector:
    """The costs, none negative, that fit best: of all choices of those above 0, the best that has no negative one."""
    scale = [math.sqrt(squares[at][at]) or 1.0 for at in range(3)]
    a = [[squares[i][j] / scale[i] / scale[j] + (i == j) * _RIDGE[i] for j in range(3)] for i in range(3)]
    b = [moment / by for moment, by in zip(moments, scale, strict=True)]
    least, best = 0.0, [0.0] * 3
    for chosen in (some for count in (1, 2, 3) for some in combinations(range(3), count)):
        solved = _solved([[a[i][j] for j in chosen] for i in chosen], [b[i] for i in chosen])
        if solved is None or min(solved) < 0:
            continue
        error = -sum(b[at] * value for at, value in zip(chosen, solved, strict=True))  # but for a constant
        if error < least:
            least, best = error, [0.0] * 3
            for at, value in zip(chosen, solved, strict=True):
                best[at] = value / scale[at]
    return best


def _solved(a: list[Vector], b: Vector) -> Vector | None:
    """x of a · x = b by Gauss and Jordan, a positive definite; None where it is singular up to rounding."""
    rows = [[*row, right] for row, right in zip(a, b, strict=True)]
    for at, row in enumerate(rows):
        if row[at] < 1e-12:
            return None
        rows[at] = row = [value / row[at] for value in row]
        for other in range(len(rows)):
            if other != at:
                factor = rows[other][at]
                rows[other] = [mine - factor * its for mine, its in zip(rows[other], row, strict=True)]
    return [row[-1] for row in rows]

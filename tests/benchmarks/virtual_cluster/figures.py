"""What became of the requests of a run, as figures. Everything here is virtual time and the same on every machine.

A gap between tokens goes into a bucket 2 % wide, because there are millions of them.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from router.core.effects import Outcome, RequestAborted, RequestCompleted, RequestFailed
from tests.benchmarks.virtual_cluster.trace import TracedRequest

BUCKET = math.log(1.02)
SHORTEST = 1e-6  # seconds; shorter gaps count as this
TARGET_SECONDS = 2.0  # within which a first token is wanted
LONG_PAUSE_SECONDS = 2.0  # between two tokens of a stream


@dataclass(slots=True, eq=False)
class AnswerRecord:
    """One request and what came back, in seconds since its arrival."""

    traced: TracedRequest
    arrived_at: float  # of the timeline
    tokens: int = 0
    tokens_counted: int = 0  # of them, within the measured time
    first: float | None = None
    second: float | None = None
    last: float = 0.0
    pause: float = 0.0  # the longest time between two tokens
    gaps: array[float] | None = None  # from each token to the next, where a run asks for them
    expected: tuple[int, ...] | None = None  # its text, where a run judges tokens
    different: int = 0  # tokens that are not those of its text, in their order; then also those that lack
    outcome: Outcome | None = None
    disconnected: bool = False  # its router ended first
    ended_at: float = 0.0  # of the timeline

    @property
    def completed(self) -> bool:
        return isinstance(self.outcome, RequestCompleted)

    @property
    def broken(self) -> bool:
        """Whether the answer ended in an error after its first token."""
        return self.tokens > 0 and not self.completed

    @property
    def outcome_word(self) -> str:
        """A finish reason, a status, or what else ended it."""
        match self.outcome:
            case RequestCompleted(reason=reason):
                return reason
            case RequestFailed(status=status):
                return str(status)
            case RequestAborted():
                return "aborted"
        return "disconnected" if self.disconnected else "open"


@dataclass(slots=True)
class GapHistogram:
    """Gaps between the tokens of an answer, from its second token on."""

    buckets: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a gap in."""
        self.buckets[int(math.log(max(seconds, SHORTEST) / SHORTEST) / BUCKET)] += count

    def quantile(self, share: float) -> float | None:
        """The upper edge of the bucket in which the quantile lies, in seconds; None: there were no gaps."""
        left = share * self.buckets.total()
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                return SHORTEST * math.exp(BUCKET * (bucket + 1))
        return None


@dataclass(slots=True, kw_only=True)
class RunRecorder:
    """Notes what clients are given while a run lives."""

    counts_from: float  # seconds of the timeline: tokens between the two count for the goodput
    counts_until: float
    judges_tokens: bool = False
    on_ended: Callable[[AnswerRecord], None] = lambda _: None
    gaps: GapHistogram = field(default_factory=GapHistogram)
    tokens_by_second: Counter[int] = field(default_factory=Counter)

    def tokens(self, record: AnswerRecord, now: float, index: int, token_ids: tuple[int, ...]) -> None:
        """A request has got tokens at once; `index` of them were before."""
        if self.judges_tokens:
            _judge(record, index, token_ids)
        count = len(token_ids)
        after = now - record.arrived_at
        if record.tokens == 0:
            record.first = after
            record.second = after if count > 1 else None
        elif record.second is None:
            record.second = after
        else:
            self.gaps.add(after - record.last)
            if count > 1:
                self.gaps.add(0.0, count - 1)
        if record.tokens:
            record.pause = max(record.pause, after - record.last)
        if record.gaps is not None:
            record.gaps.extend(([after - record.last] if record.tokens else []) + [0.0] * (count - 1))
        record.tokens += count
        record.last = after
        self.tokens_by_second[int(now)] += count
        if self.counts_from <= now < self.counts_until:
            record.tokens_counted += count

    def ended(self, record: AnswerRecord, outcome: Outcome, now: float) -> None:
        """A request has its outcome."""
        record.outcome = outcome
        record.ended_at = now
        if self.judges_tokens and record.completed:
            record.different += len(record.traced.output()) - record.tokens
        record.expected = None
        self.on_ended(record)


def _judge(record: AnswerRecord, index: int, token_ids: tuple[int, ...]) -> None:
    record.expected = record.expected or record.traced.output()
    expected = record.expected[record.tokens : record.tokens + len(token_ids)]
    if index != record.tokens or token_ids != expected:
        right = sum(one == other for one, other in zip(token_ids, expected, strict=False))
        record.different += max(1, len(token_ids) - right)


Figures = dict[str, object]


def quantile(values: Sequence[float], share: float) -> float | None:
    """A quantile of sorted `values` by the nearest rank; None: there are none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else None


def first_tokens(records: Iterable[AnswerRecord]) -> list[float]:
    """Seconds from arrival to the first token, ascending."""
    return sorted(record.first for record in records if record.first is not None)


def second_token_gaps(records: Iterable[AnswerRecord]) -> list[float]:
    """Seconds from the first token to the second, ascending."""
    return sorted(
        record.second - record.first
        for record in records
        if record.first is not None and record.second is not None
    )


def request_figures(records: Iterable[AnswerRecord]) -> Figures:
    """Latencies and ends of some requests."""
    records = list(records)
    firsts, seconds = first_tokens(records), second_token_gaps(records)
    figures: Figures = {"requests": len(records)}
    figures |= {f"ttft_p{name}": _rounded(quantile(firsts, share)) for name, share in QUANTILES}
    figures |= {f"second_token_gap_p{name}": _rounded(quantile(seconds, share)) for name, share in QUANTILES}
    figures["pause_max"] = _rounded(max((record.pause for record in records), default=None))
    streams = [record for record in records if record.tokens > 1]
    paused = sum(record.pause > LONG_PAUSE_SECONDS for record in streams)
    figures["long_pause_share"] = round(paused / max(1, len(streams)), 4)
    figures["outcomes"] = dict(sorted(Counter(record.outcome_word for record in records).items()))
    broken = [record for record in records if record.broken]
    figures["broken_streams"] = len(broken)
    figures["broken_before_second"] = sum(record.tokens == 1 for record in broken)
    figures["request_seconds_p50"] = _rounded(
        quantile(sorted(record.last for record in records if record.completed), 0.5)
    )
    return figures


QUANTILES = (("50", 0.5), ("90", 0.9), ("99", 0.99))


def goodput(records: Iterable[AnswerRecord], began: float, ended: float) -> Figures:
    """Tokens that came between `began` and `ended` to requests that completed, and the requests that completed then."""
    records = list(records)
    tokens = sum(record.tokens_counted for record in records if record.completed)
    done = sum(record.completed and began <= record.ended_at < ended for record in records)
    return {
        "goodput_tokens_per_second": round(tokens / (ended - began), 1),
        "goodput_requests_per_second": round(done / (ended - began), 3),
    }


def within_target(records: Iterable[AnswerRecord], began: float, ended: float) -> Figures:
    """Requests a second that came between `began` and `ended`, had their first token soon and completed."""
    met = sum(
        record.completed and record.first is not None and record.first <= TARGET_SECONDS
        for record in records
        if began <= record.arrived_at < ended
    )
    return {"within_target_per_second": round(met / (ended - began), 3)}


def digest(records: Iterable[AnswerRecord]) -> str:
    """Two runs of one seed agree in it."""
    made = hashlib.blake2b(digest_size=16)
    for record in records:
        fields = (record.traced.number, record.tokens, record.first, record.second, record.last)
        made.update(f"{fields} {record.outcome_word}\n".encode())
    return made.hexdigest()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)

"""Figures of streams: pure arithmetic over the times at which events came, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from tests.benchmarks.client.recording import RecordedStream


def seconds_per_token(stream: RecordedStream) -> float:
    """Time per output token after the first; the server's count of tokens, not ours of events."""
    if stream.output_tokens < 2:
        raise ValueError("one token has no time between tokens")
    return (stream.last - stream.first) / (stream.output_tokens - 1)


def seconds_to_first(stream: RecordedStream) -> float:
    """Time from sending the request to its first token."""
    return stream.first - stream.sent


def seconds_together(streams: Sequence[RecordedStream]) -> float:
    """From the first request sent to the last token of any stream."""
    return max(stream.last for stream in streams) - min(stream.sent for stream in streams)


def tokens_per_second(streams: Sequence[RecordedStream]) -> float:
    """Output tokens of all streams over the time that they took together, prompts and waiting included."""
    return sum(stream.output_tokens for stream in streams) / seconds_together(streams)


def longest_gap(times: Sequence[float], start: float = float("-inf"), end: float = float("inf")) -> float:
    """Longest time between two neighbouring events of one stream, of those gaps that touch `start`…`end`."""
    return max((b - a for a, b in pairwise(times) if b >= start and a <= end), default=0.0)


def middle(values: Sequence[float]) -> float:
    """The median; of an even number the mean of the middle two."""
    return float(median(values))

"""The arithmetic of the figures, on streams small enough to check by hand."""

from __future__ import annotations

import pytest

from tests.benchmarks.client import figures
from tests.benchmarks.client.recording import RecordedStream
from tests.benchmarks.client.report import three_digits


def stream(sent: float, *times: float, tokens: int | None = None) -> RecordedStream:
    return RecordedStream(sent, times, output_tokens=len(times) if tokens is None else tokens)


def test_time_per_token_leaves_the_first_token_out() -> None:
    assert figures.seconds_per_token(stream(0.0, 5.0, 5.1, 5.2, 5.3)) == pytest.approx(0.1)


def test_time_per_token_counts_tokens_and_not_events() -> None:
    assert figures.seconds_per_token(stream(0.0, 1.0, 2.0, tokens=11)) == pytest.approx(0.1)


def test_one_token_has_no_time_per_token() -> None:
    with pytest.raises(ValueError, match="one token"):
        figures.seconds_per_token(stream(0.0, 1.0))


def test_throughput_is_over_the_time_from_the_first_request_to_the_last_token() -> None:
    together = [stream(10.0, 11.0, 12.0), stream(9.0, 13.0, 13.5, 14.0)]
    assert figures.seconds_together(together) == pytest.approx(5.0)
    assert figures.tokens_per_second(together) == pytest.approx(1.0)


def test_the_first_token_is_waited_for_from_the_request_on() -> None:
    assert figures.seconds_to_first(stream(2.0, 2.75, 3.0)) == pytest.approx(0.75)


def test_the_longest_gap_is_the_longest() -> None:
    assert figures.longest_gap([0.0, 1.0, 4.0, 4.5]) == pytest.approx(3.0)


def test_a_gap_counts_when_any_of_it_lies_in_the_window() -> None:
    times = [0.0, 9.0, 10.0, 13.0, 14.0, 20.0]
    assert figures.longest_gap(times, 9.5, 12.0) == pytest.approx(3.0)
    assert figures.longest_gap(times, 8.0, 12.0) == pytest.approx(9.0)
    assert figures.longest_gap(times, 13.2, 13.4) == pytest.approx(1.0)


def test_a_stream_without_two_events_has_no_gap() -> None:
    assert figures.longest_gap([1.0]) == 0.0
    assert figures.longest_gap([]) == 0.0


@pytest.mark.parametrize(("values", "expected"), [([3.0, 1.0, 2.0], 2.0), ([4.0, 1.0], 2.5), ([7.0], 7.0)])
def test_the_middle_is_the_median(values: list[float], expected: float) -> None:
    assert figures.middle(values) == expected


@pytest.mark.parametrize(
    ("value", "shown"), [(0.01234, "0.0123"), (1.234, "1.23"), (99.95, "100"), (1234.5, "1234"), (0.0, "0")]
)
def test_figures_are_shown_with_three_digits(value: float, shown: str) -> None:
    assert three_digits(value) == shown

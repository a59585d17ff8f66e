"""Text ends before its first stop string, however it was cut, at a cost that the stop strings do not multiply."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stop_strings import StopPattern, StopStrings

LETTERS = st.text("ab", max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)
CUTS = st.lists(st.integers(1, 5), min_size=1)

STOP_CHARS = 1023
NEARLY_MATCHED = ["a" * (STOP_CHARS - 1) + "x", *(letter * STOP_CHARS for letter in "bcdefghijklmnop")]
ALIKE = ["a" * (1000 + more) + "b" for more in range(16)]


def stop_strings(stops: Sequence[str]) -> StopStrings:
    return StopStrings([StopPattern(stop) for stop in stops])


class SliceBySlice:
    """The same by comparing every end of the text with every beginning of every stop string."""

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        held = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        lengths = range(min(len(text), len(stop) - 1), 0, -1)
        return next((length for length in lengths if text.endswith(stop[:length])), 0)


def outputs(filter_: StopStrings | SliceBySlice, text: str, cuts: Sequence[int]) -> list[tuple[str, bool]]:
    """What came out after each piece, and at the end."""
    pieces, at, lengths = [], 0, cycle(cuts)
    while at < len(text):
        pieces.append(filter_.push(text[at : (at := at + next(lengths))]))
        if pieces[-1][1]:
            return pieces
    return [*pieces, (filter_.finish(), False)]


@given(LETTERS, STOPS, CUTS)
def test_each_piece_passes_as_much_as_when_every_slice_is_compared(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    assert outputs(stop_strings(stops), text, cuts) == outputs(SliceBySlice(stops), text, cuts)


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before its first stop string, by looking at every beginning of the text."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(LETTERS, STOPS, CUTS)
def test_text_ends_before_the_first_stop_string_however_it_was_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    pieces = outputs(stop_strings(stops), text, cuts)
    assert ("".join(piece for piece, _ in pieces), pieces[-1][1]) == first_stop(text, stops)


def test_choices_share_a_pattern_and_nothing_of_their_texts() -> None:
    pattern = StopPattern("aab")
    one, other = StopStrings([pattern]), StopStrings([pattern])
    assert one.push("aaa") == ("a", False)
    assert other.push("b") == ("b", False)
    assert one.push("b") == ("", True)


def test_what_may_begin_a_stop_string_is_held_back_and_no_more() -> None:
    filter_ = stop_strings(["\n\nQ:"])
    assert filter_.push("yes\n") == ("yes", False)
    assert filter_.push("\n") == ("", False)
    assert filter_.push("no") == ("\n\nno", False)
    assert filter_.push("\n\nQ: next") == ("", True)


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert stop_strings([]).push("anything") == ("anything", False)


class CountingStop(str):
    """Counts how often one of its characters or slices is looked at."""

    looks = 0

    def __getitem__(self, at: object) -> str:
        CountingStop.looks += 1
        return super().__getitem__(at)  # type: ignore[index]


@pytest.mark.parametrize("stops", [NEARLY_MATCHED, ALIKE], ids=["one nearly matched", "all nearly matched"])
def test_a_character_costs_a_constant_for_each_stop_string_however_long_they_are(stops: list[str]) -> None:
    filter_ = stop_strings([CountingStop(stop) for stop in stops])
    text = ("a" * 998 + "c") * 4
    CountingStop.looks = 0
    for at in range(0, len(text), 4):
        filter_.push(text[at : at + 4])
    borders = sum(map(len, stops))  # computed once
    assert CountingStop.looks <= 4 * (len(stops) * len(text) + borders)


@given(LETTERS, LETTERS, STOPS, CUTS)
def test_a_stop_string_counts_that_ends_behind_what_it_may_not_end(
    first: str, rest: str, stops: list[str], cuts: list[int]
) -> None:
    filter_ = stop_strings(stops)
    passed, stopped = filter_.push(first, may_end=False)
    assert not stopped
    pieces = outputs(filter_, rest, cuts)
    whole = first + rest
    ends = (end for end in range(len(first) + 1, len(whole) + 1) if whole[:end].endswith(tuple(stops)))
    end = next(ends, None)
    found = [stop for stop in stops if end is not None and whole[:end].endswith(stop)]
    expected = whole if end is None else whole[: end - max(map(len, found))]
    assert passed + "".join(text for text, _ in pieces) == expected

"""The growth that admission keeps room for: the most that requests hold together as they grow and end."""

from __future__ import annotations

import pytest

from decode.expected_growth import ExpectedGrowth
from shared.batch.req import Req
from shared.scheduling.output_lengths import OutputLengths
from shared.wire.sampling_params import SamplingParams


def growth(
    lengths: OutputLengths, *ages: int, prompt: int = 100, bound: int = 4000, ignore_eos: bool = False
) -> float:
    """Of requests that have generated as many tokens."""
    expected = ExpectedGrowth(lengths, steps_certain=20, clip=512, ratio=0.5)
    params = SamplingParams(max_new_tokens=bound, seed=1, ignore_eos=ignore_eos)
    expected.add(
        Req(f"r{n}", 1, "router", n, [1] * (prompt + age), prompt, params) for n, age in enumerate(ages)
    )
    return expected.tokens


def seen(*lengths: int) -> OutputLengths:
    known = OutputLengths()
    for length in lengths:
        known.add(length, at_bound=False)
    return known


def test_young_requests_grow_together_to_the_length_that_was_seen() -> None:
    assert growth(seen(*[400] * 20), *[1] * 10) == pytest.approx(10 * 384, rel=0.1)


def test_requests_of_all_ages_end_as_fast_as_the_others_grow() -> None:
    lengths = seen(*range(200, 800))
    assert growth(lengths, *range(1, 800, 8)) < 0.2 * growth(lengths, *[1] * 100)


def test_no_request_grows_beyond_its_own_bound() -> None:
    assert growth(seen(*[400] * 20), *[1] * 10, bound=50) <= 10 * 49


def test_a_request_that_ignores_the_end_token_grows_to_its_bound_whatever_was_seen() -> None:
    assert growth(seen(*[30] * 20), *[1] * 10, bound=800, ignore_eos=True) == pytest.approx(10 * 768)


def test_what_is_longer_than_all_outputs_seen_is_guessed_by_the_ratio() -> None:
    assert growth(seen(*[30] * 20), 100) == 20 + 0.5 * 512


def test_the_next_steps_of_all_are_kept_even_if_all_are_about_to_end() -> None:
    assert growth(seen(*[400] * 20), *[395] * 10) >= 10 * 20

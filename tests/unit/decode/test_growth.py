"""What admission expects: lengths of outputs, the growth of all requests, the new-token ratio, and sums kept for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from decode.growth import (
    OUTPUTS_REMEMBERED,
    SEEN_MIN,
    STEPS_AHEAD,
    CachedSum,
    ExpectedGrowth,
    NewTokenRatio,
    OutputLengths,
)
from shared.batch.req import Req
from shared.wire.sampling_params import SamplingParams


def share_going_on(lengths: OutputLengths, steps: int) -> float:
    """The share of outputs without a token that go on for so many steps, one of `STEPS_AHEAD`."""
    return lengths.shares_going_on(0)[STEPS_AHEAD.index(steps)]


def after(*lengths: int, at_bound: bool = False) -> OutputLengths:
    seen = OutputLengths()
    for length in lengths:
        seen.add(length, at_bound=at_bound)
    return seen


def requests(*ages: int, prompt: int = 100, bound: int = 4000, ignore_eos: bool = False) -> list[Req]:
    """Requests that have generated as many tokens as `ages` says."""
    params = SamplingParams(max_new_tokens=bound, seed=1, ignore_eos=ignore_eos)
    return [Req(f"r{n}", 1, "router", n, [1] * (prompt + age), prompt, params) for n, age in enumerate(ages)]


def growth_of(lengths: OutputLengths, reqs: list[Req]) -> float:
    expected = ExpectedGrowth(lengths, steps_certain=20, clip=512, ratio=0.5)
    expected.add(reqs)
    return expected.tokens


def growth(lengths: OutputLengths, *ages: int, bound: int = 4000, ignore_eos: bool = False) -> float:
    """The growth of requests that have generated as many tokens as `ages` says."""
    return growth_of(lengths, requests(*ages, bound=bound, ignore_eos=ignore_eos))


# ---- the most that requests hold together as they grow and end ----


def test_young_requests_grow_together_to_the_length_that_was_seen() -> None:
    assert growth(after(*[400] * 20), *[1] * 10) == pytest.approx(10 * 384, rel=0.1)


def test_requests_of_all_ages_end_as_fast_as_the_others_grow() -> None:
    lengths = after(*range(200, 800))
    assert growth(lengths, *range(1, 800, 8)) < 0.2 * growth(lengths, *[1] * 100)


def test_no_request_grows_beyond_its_own_bound() -> None:
    assert growth(after(*[400] * 20), *[1] * 10, bound=50) <= 10 * 49


def test_of_requests_of_one_age_each_ends_at_its_own_bound() -> None:
    lengths, young = after(*[4000] * 20), [1] * 10
    together = growth_of(lengths, [*requests(*young, bound=50), *requests(*young, bound=3000)])
    returned = 10 * 101  # by those of the small bound, which have ended when the others hold most
    assert together == pytest.approx(growth(lengths, *young, bound=3000) - returned)


def test_a_request_that_ignores_the_end_token_grows_to_its_bound_whatever_was_seen() -> None:
    assert growth(after(*[30] * 20), *[1] * 10, bound=800, ignore_eos=True) == pytest.approx(10 * 768)


def test_what_is_longer_than_all_outputs_seen_is_guessed_by_the_ratio() -> None:
    assert growth(after(*[30] * 20), 100) == 20 + 0.5 * 512


def test_the_next_steps_of_all_are_kept_even_if_all_are_about_to_end() -> None:
    assert growth(after(*[400] * 20), *[395] * 10) >= 10 * 20


# ---- what the lengths of outputs that have ended say of those that run ----


def test_nothing_is_known_until_enough_outputs_have_ended() -> None:
    assert not after(*[100] * (SEEN_MIN - 1)).known
    assert after(*[100] * SEEN_MIN).known


def test_outputs_of_like_length_all_come_near_it_and_none_much_beyond() -> None:
    seen = after(*[150] * 50)
    assert share_going_on(seen, 96) == 1.0
    assert share_going_on(seen, 192) == 0.0


def test_half_short_and_half_long_outputs_are_told_apart_by_those_that_outlive_the_short() -> None:
    seen = after(*[20, 1000] * 50)
    assert share_going_on(seen, 24) == pytest.approx(0.5)
    assert share_going_on(seen, 768) == pytest.approx(0.5)
    assert share_going_on(seen, 1024) == 0.0


def test_an_output_that_ended_at_its_bound_does_not_say_where_others_end() -> None:
    seen = after(*[16] * 50, at_bound=True)
    for _ in range(10):
        seen.add(500, at_bound=False)
    assert share_going_on(seen, 384) == 1.0


def test_old_outputs_are_forgotten() -> None:
    seen = after(*[2000] * OUTPUTS_REMEMBERED)
    for _ in range(8 * OUTPUTS_REMEMBERED):
        seen.add(50, at_bound=False)
    assert share_going_on(seen, 96) < 0.01


def test_an_output_longer_than_any_context_is_counted_all_the_same() -> None:
    seen = after(*[1 << 22] * SEEN_MIN)
    assert share_going_on(seen, 6144) == 1.0
    assert growth(seen, 1 << 22, bound=1 << 23) > 0


# ---- new-token ratio ----


def _ratio(*, conservativeness: float = 1.0, headroom_steps: int = 20) -> NewTokenRatio:
    return NewTokenRatio(
        init=0.7,
        conservativeness=conservativeness,
        min_factor=0.14,
        decay_steps=600,
        headroom_steps=headroom_steps,
    )


def test_the_ratio_starts_at_its_init_and_decays_linearly_to_its_least() -> None:
    ratio = _ratio()
    assert ratio.value == pytest.approx(0.7)
    for _ in range(300):
        ratio.decay()
    assert ratio.value == pytest.approx(0.7 * (1 + 0.14) / 2)
    for _ in range(900):
        ratio.decay()
    assert ratio.value == pytest.approx(0.7 * 0.14)


@pytest.mark.parametrize(
    ("output_lens", "max_new_tokens", "value"),
    [
        pytest.param(
            [100, 60], [400, 399], 200 / 800, id="what was used and 20 steps more, of what is allowed"
        ),
        pytest.param([10], [15], 1.0, id="never more than all"),
        pytest.param([0], [199], 20 / 200, id="one request without output yet"),
    ],
)
def test_a_retraction_sets_the_ratio_to_what_requests_really_use(
    output_lens: list[int], max_new_tokens: list[int], value: float
) -> None:
    ratio = _ratio()
    ratio.after_retraction(output_lens, max_new_tokens)
    assert ratio.value == pytest.approx(value)


def test_the_steps_that_fit_after_a_retraction_are_expected_as_output() -> None:
    ratio = _ratio(headroom_steps=40)
    ratio.after_retraction([100], [399])
    assert ratio.value == pytest.approx(140 / 400)


def test_an_idle_worker_starts_over() -> None:
    ratio = _ratio()
    ratio.after_retraction([10], [15])
    ratio.reset()
    assert ratio.value == pytest.approx(0.7)


@pytest.mark.parametrize(("conservativeness", "value"), [(0.5, 0.35), (1.0, 0.7), (2.0, 1.0)])
def test_conservativeness_scales_the_ratio_up_to_all(conservativeness: float, value: float) -> None:
    assert _ratio(conservativeness=conservativeness).value == pytest.approx(value)


# ---- sums over the requests that are here: each request is added once until the sum is invalidated ----


class Counted:
    """A sum of prompt lengths, and how many requests were added to make it."""

    def __init__(self) -> None:
        self.added = 0
        self.here: Sequence[Req] = ()
        self.sum = CachedSum(lambda: self.here, int, self._plus)

    def over(self, reqs: Sequence[Req]) -> int:
        """The sum where these are here."""
        self.here = reqs
        return self.sum.get()

    def _plus(self, total: int, reqs: Sequence[Req]) -> int:
        self.added += len(reqs)
        return total + sum(req.prompt_len for req in reqs)


def crowd(count: int) -> list[Req]:
    params = SamplingParams(max_new_tokens=9, seed=1)
    return [Req(f"r{number}", 1, "router", number, [1] * number, number, params) for number in range(count)]


def test_a_burst_adds_each_request_once() -> None:
    counted, reqs = Counted(), crowd(64)
    for here, req in enumerate(reqs):
        assert counted.over(reqs[:here]) == sum(range(here))
        counted.sum.add(req)
    assert counted.over(reqs) == sum(range(64))
    assert counted.added == len(reqs)


def test_an_invalidated_sum_counts_nobody_who_left() -> None:
    counted, reqs = Counted(), crowd(4)
    counted.over(reqs)
    counted.sum.invalidate()
    assert counted.over([reqs[0], *reqs[2:]]) == 0 + 2 + 3


def test_one_that_comes_before_the_sum_is_made_is_counted_once() -> None:
    counted, reqs = Counted(), crowd(4)
    counted.sum.add(reqs[3])
    assert counted.over(reqs) == sum(range(4))

"""Claims about what steps cost, and about the chunk that fits a step: by planted costs, with and without noise."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.scheduling.chunk_budget import chunk_tokens
from shared.scheduling.step_cost import (
    DECODE_STEPS,
    EXTEND_STEPS,
    ExtendCost,
    ExtendRate,
    LeastPass,
    StepCost,
)

PAGE = 16
TOKENS_MAX = 2048
POSITION_MAX = 8192

# From a GPU of today to two cores: a pass, a token, and a token's position.
COSTS = st.builds(
    ExtendCost,
    st.floats(1e-4, 1e-2),
    st.floats(2e-5, 1e-3),
    st.floats(1e-9, 3e-7),
)
DECODE = st.floats(1e-3, 3e-2)


def _learnt(
    planted: ExtendCost, decode: float, *, seed: int, noise: float = 0.0, steps: int = 300
) -> StepCost:
    """The costs after steps of many sizes, each of which took longer or shorter by a share of up to `noise`."""
    drawn, cost = random.Random(seed), StepCost()
    for _ in range(steps):
        rows = drawn.choice((0, 1, 5, 8))
        noisy = 1 + drawn.uniform(-noise, noise)
        if rows:
            cost.observe_decode(rows, decode * (1 + rows / 8) * noisy)
        prompts = [
            (drawn.randrange(0, POSITION_MAX, PAGE), drawn.randint(1, TOKENS_MAX))
            for _ in range(drawn.randint(1, 3))
        ]
        beyond = sum(planted.seconds(start, tokens) - planted.fixed for start, tokens in prompts)
        own = decode * (1 + rows / 8) if rows else 0.0
        cost.observe_extend(rows, prompts, (own + planted.fixed + beyond) * noisy)
    return cost


@given(planted=COSTS, decode=DECODE, seed=st.integers(0, 2**16))
@settings(max_examples=20, deadline=None)
def test_planted_costs_are_found(planted: ExtendCost, decode: float, seed: int) -> None:
    cost = _learnt(planted, decode, seed=seed)
    assert cost.extend is not None
    assert cost.extend.token == pytest.approx(planted.token, rel=0.01)
    for start, tokens in ((0, PAGE), (0, 512), (4096, 256), (POSITION_MAX, TOKENS_MAX)):
        assert cost.extend.seconds(start, tokens) == pytest.approx(planted.seconds(start, tokens), rel=0.02)
    for rows in (1, 5, 8):
        assert cost.decode_seconds(rows) == pytest.approx(decode * (1 + rows / 8))


@given(planted=COSTS, decode=DECODE, seed=st.integers(0, 2**16))
@settings(
    max_examples=20, deadline=None, derandomize=True
)  # of noise there is always a draw that is too unlikely
def test_they_are_found_under_noise(planted: ExtendCost, decode: float, seed: int) -> None:
    cost = _learnt(planted, decode, seed=seed, noise=0.1, steps=600)
    assert cost.extend is not None
    for start, tokens in ((1024, 512), (4096, 1024), (6144, TOKENS_MAX)):
        assert cost.extend.seconds(start, tokens) == pytest.approx(planted.seconds(start, tokens), rel=0.1)
    for rows in (1, 5, 8):
        assert cost.decode_seconds(rows) == pytest.approx(decode * (1 + rows / 8), rel=0.1)


@given(seed=st.integers(0, 2**16), noise=st.floats(0.0, 0.9))
@settings(max_examples=40, deadline=None)
def test_no_cost_is_negative(seed: int, noise: float) -> None:
    cost = _learnt(ExtendCost(1e-4, 1e-4, 0.0), 1e-3, seed=seed, noise=noise, steps=20)
    assert cost.extend is not None
    assert min(cost.extend) >= 0


def test_steps_of_one_length_make_longer_ones_dear_rather_than_cheap() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.observe_extend(0, [(0, 128)], 0.1)
    assert cost.extend is not None
    assert cost.extend.seconds(0, 128) == pytest.approx(0.1, rel=1e-3)
    assert cost.extend.seconds(0, 1024) == pytest.approx(0.8, rel=0.01)


def test_a_device_that_becomes_slower_is_learnt_anew() -> None:
    cost = StepCost()
    for factor, steps in ((1, 500), (3, 4 * EXTEND_STEPS)):
        for at in range(steps):
            cost.observe_decode(4, factor * 0.01)
            cost.observe_extend(4, [(0, 16 + 16 * (at % 8))], factor * (0.01 + 0.001 * (16 + 16 * (at % 8))))
    assert cost.extend is not None
    assert cost.decode_seconds(4) == pytest.approx(0.03, rel=0.01)
    assert cost.extend.seconds(0, 64) == pytest.approx(3 * 0.064, rel=0.05)


def test_the_first_pass_hardly_counts_once_there_is_another() -> None:
    cost, planted = StepCost(), ExtendCost(0.01, 0.001, 0.0)
    cost.observe_extend(0, [(0, 128)], 5 * planted.seconds(0, 128))
    cold, warm = cost.extend_rate(0, 128), 128 / planted.seconds(0, 128)
    assert cold.tokens_per_second == pytest.approx(warm / 5, rel=0.05), "nothing else is known"
    cost.observe_extend(0, [(0, 128)], planted.seconds(0, 128))
    assert cost.extend_rate(0, 128).tokens_per_second > 0.75 * warm
    for _ in range(3):
        cost.observe_extend(0, [(0, 128)], planted.seconds(0, 128))
    assert cost.extend_rate(0, 128).tokens_per_second > 0.9 * warm


def test_one_slow_step_is_not_the_average() -> None:
    cost = StepCost()
    for _ in range(DECODE_STEPS):
        cost.observe_decode(2, 0.01)
    cost.observe_decode(2, 0.33)
    assert cost.decode_seconds(2) == pytest.approx(0.02)


def test_rows_that_were_never_seen_cost_as_much_as_more_rows_or_as_the_most() -> None:
    cost = StepCost()
    assert cost.decode_seconds(8) == 0.0
    cost.observe_decode(8, 0.02)
    assert [cost.decode_seconds(rows) for rows in (0, 1, 8)] == [0.0, 0.02, 0.02]
    assert cost.decode_seconds(32) == 0.02


def test_seconds_that_are_not_known_teach_nothing() -> None:
    cost = StepCost()
    cost.observe_decode(2, 0.0)
    cost.observe_extend(0, [(0, 16)], 0.0)
    cost.observe_extend(2, [(0, 16)], 0.1)  # no step has told what the rows beside it cost
    assert (cost.decode_seconds(2), cost.extend) == (0.0, None)


def test_a_first_pass_that_seems_to_take_nothing_does_not_end_what_later_ones_teach() -> None:
    cost = StepCost()
    cost.observe_decode(4, 0.02)
    for seconds in (0.019, *[0.03] * 20):  # noise: less than the rows alone
        cost.observe_extend(4, [(0, 64)], seconds)
    assert cost.extend is not None
    assert cost.extend.seconds(0, 64) == pytest.approx(0.01, rel=0.1)


# ---- the chunk that fits ----


def _chunk(cost: StepCost, rows: int, position: int, bound: float) -> int:
    return chunk_tokens(
        cost, rows=rows, position=position, bound_seconds=bound, page_size=PAGE, tokens_max=TOKENS_MAX
    )


LEARNT = st.builds(
    lambda planted, decode, seed: _learnt(planted, decode, seed=seed, noise=0.1, steps=60),
    COSTS,
    DECODE,
    st.integers(0, 2**16),
)
POSITIONS = st.integers(0, POSITION_MAX)
BOUNDS = st.floats(1e-3, 1.0)


@given(cost=LEARNT, rows=st.integers(0, 64), position=POSITIONS, bound=BOUNDS)
@settings(max_examples=150, deadline=None)
def test_no_step_is_longer_than_its_bound_but_for_one_page(
    cost: StepCost, rows: int, position: int, bound: float
) -> None:
    tokens = _chunk(cost, rows, position, bound)
    assert 0 < tokens <= TOKENS_MAX
    assert (position + tokens) % PAGE == 0
    assert cost.extend is not None
    own = cost.decode_seconds(rows)
    if tokens > PAGE - position % PAGE:
        assert own + cost.extend.seconds(position, tokens) <= bound * (1 + 1e-9)
    if tokens + PAGE <= TOKENS_MAX:  # and none could be longer
        assert own + cost.extend.seconds(position, tokens + PAGE) > bound * (1 - 1e-9)


@given(cost=LEARNT, rows=st.integers(0, 64), page=st.integers(0, 500), bound=BOUNDS, more=st.floats(1, 4))
@settings(max_examples=100, deadline=None)
def test_more_time_is_never_fewer_tokens_and_a_later_position_never_more(
    cost: StepCost, rows: int, page: int, bound: float, more: float
) -> None:
    tokens = _chunk(cost, rows, page * PAGE, bound)
    assert _chunk(cost, rows, page * PAGE, more * bound) >= tokens
    assert _chunk(cost, rows, (page + 1) * PAGE, bound) <= tokens
    assert _chunk(cost, 0, page * PAGE, bound) >= tokens


def test_until_a_step_has_told_a_chunk_is_a_page() -> None:
    assert [_chunk(StepCost(), 0, position, 10.0) for position in (0, 5, PAGE)] == [PAGE, PAGE - 5, PAGE]


@given(planted=COSTS, decode=DECODE, rows=st.sampled_from((0, 1, 8)), tokens=st.integers(1, TOKENS_MAX))
@settings(max_examples=20, deadline=None)
def test_a_rate_is_what_so_large_steps_compute_a_second(
    planted: ExtendCost, decode: float, rows: int, tokens: int
) -> None:
    rate = _learnt(planted, decode, seed=1).extend_rate(rows, tokens)
    step = planted.seconds(0, tokens) + (decode * (1 + rows / 8) if rows else 0.0)
    assert rate.tokens_per_second == pytest.approx(tokens / step, rel=0.08)
    assert rate.position_seconds == pytest.approx(
        planted.position * step / planted.seconds(0, tokens), rel=0.15
    )


def test_no_rate_is_told_before_a_step_has_told_and_noise_of_a_percent_does_not_change_it() -> None:
    assert StepCost().extend_rate(0, 512) == ExtendRate()
    rates = {
        _learnt(ExtendCost(0.001, 1e-4, 0.0), 0.01, seed=seed, noise=0.001).extend_rate(0, 512)
        for seed in range(5)
    }
    assert len({rate.tokens_per_second for rate in rates}) == 1


def test_the_least_pass_is_what_small_ones_take_whatever_long_ones_take() -> None:
    least = LeastPass()
    assert least.of(16) == 0.0, "none was seen"
    least.observe(1024, 0.064)
    assert (least.of(16), least.of(1024)) == (0.0, 0.064), "a long pass tells nothing of a small one"
    least.observe(16, 0.008)
    for _ in range(10):
        least.observe(16, 0.008)
    small = least.of(16)
    assert small == pytest.approx(0.008, rel=0.02)
    for _ in range(200):
        least.observe(1024, 0.064)
    assert least.of(16) == small
    for _ in range(10):
        least.observe(24, 0.012)
    assert least.of(16) == pytest.approx(0.012, rel=0.02), "they take longer now"
    for _ in range(40):
        least.doubt()
    assert least.of(16) < 0.008, "in the end one is tried again"


def test_a_small_pass_that_seemed_to_take_no_time_is_not_forgotten_for_a_large_one() -> None:
    least = LeastPass()
    for tokens, seconds in ((4096, 0.1), (16, 0.0), (4096, 0.1)):
        least.observe(tokens, seconds)
    assert least.of(16) == 0.0, "no small pass has told what it takes"
    least.observe(16, 0.008)
    assert least.of(16) == 0.008


def _after(passes: Iterator[tuple[int, float]]) -> LeastPass:
    least = LeastPass()
    for tokens, seconds in passes:
        least.observe(tokens, seconds)
    return least


def test_the_last_tokens_of_a_prompt_do_not_end_what_the_least_pass_learns() -> None:
    least = _after((tokens, 0.008) for tokens in (16, 32, 1))
    for _ in range(20):
        least.observe(48, 0.016)
    assert least.of(16) == pytest.approx(0.016, rel=0.02), "the device is slower now"


def test_one_pass_out_of_line_hardly_moves_the_least() -> None:
    for out_of_line in (0.0, 0.8):
        least = _after((16, 0.008) for _ in range(20))
        least.observe(16, out_of_line)
        assert least.of(16) == pytest.approx(0.008, rel=0.3)
    least = _after((tokens, seconds) for tokens, seconds in ((16, 0.0), (16, 0.008), (16, 0.008)))
    assert least.of(16) == pytest.approx(0.008, rel=0.3), "the first one told nothing"


def test_larger_passes_that_took_less_lower_the_least_slowly() -> None:
    least = _after((16, 0.016) for _ in range(20))
    least.observe(512, 0.008)
    assert 0.0155 < least.of(16) < 0.016
    for _ in range(1_000):
        least.observe(512, 0.008)
    assert least.of(16) == pytest.approx(0.008, rel=0.02)


@given(seed=st.integers(0, 2**16), decode=st.sampled_from((0.010, 0.020, 0.030)))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_noisy_device_leaves_the_least_pass_within_a_band(seed: int, decode: float) -> None:
    """A GPU whose passes of up to 256 tokens take as long as reading its weights; steps take a fifth more or less."""
    drawn, cost, fixed, seen = random.Random(seed), StepCost(), 0.008, []

    def noise() -> float:
        return 1 + drawn.uniform(-0.2, 0.2)

    for at in range(1_500):
        outlier = drawn.choice((0.3, 3.0, 10.0)) if drawn.random() < 0.02 else 1.0
        cost.observe_decode(8, decode * noise())
        tokens = drawn.randint(1, drawn.choice((16, 64, 256, 2_048)))
        beyond = max(fixed, tokens * fixed / 256)
        cost.observe_extend(8, [(0, tokens)], (decode + beyond) * noise() * outlier)
        if at > 100:
            seen.append(cost.least.of(16))
    seen.sort()
    assert 0.6 * fixed < seen[len(seen) // 2] < 1.5 * fixed
    assert 0.3 * fixed < seen[len(seen) // 20]
    assert seen[-len(seen) // 20] < 2 * fixed


def test_where_tokens_take_most_of_a_small_pass_the_least_is_what_a_page_takes() -> None:
    cost = StepCost()
    for _ in range(20):
        for tokens in (8, 16, 32, 64, 256):
            cost.observe_extend(0, [(0, tokens)], 0.004 + 0.001 * tokens)
    assert cost.least.of(16) == pytest.approx(0.020, rel=0.2)

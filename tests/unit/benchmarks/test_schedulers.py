"""Planning and settling cost what changes, not all that is there: lines of Python, compared with each other."""

from __future__ import annotations

from tests.benchmarks.schedulers import decode_churn, decode_steady, lines, prefill_plan


def test_a_plan_of_prefill_costs_the_same_however_many_leases_there_are() -> None:
    assert prefill_plan(405, 100, 1, lines) <= 1.05 * prefill_plan(5, 100, 1, lines)


def test_ten_times_as_many_prompts_that_wait_cost_a_plan_a_few_times_as_much() -> None:
    assert prefill_plan(5, 1_000, 1, lines) <= 4 * prefill_plan(5, 100, 1, lines)


def test_a_join_and_an_end_cost_a_step_the_same_however_many_rows_it_has() -> None:
    few, many = (decode_churn(rows, 6, lines) - 2 * decode_steady(rows, 12, lines) for rows in (64, 256))
    assert 0 < many <= 1.3 * few

"""Sums over the requests that are here: each request is added once between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from decode.present import KeptSum
from shared.req import Req
from shared.sampling_params import SamplingParams


class Counted:
    """A sum of prompt lengths, and how many requests were added to make it."""

    def __init__(self, steps_kept: int = 1) -> None:
        self.added = 0
        self.sum = KeptSum(int, self._add, steps_kept)

    def _add(self, total: int, reqs: Sequence[Req]) -> int:
        self.added += len(reqs)
        return total + sum(req.prompt_len for req in reqs)


def crowd(count: int) -> list[Req]:
    params = SamplingParams(max_new_tokens=9, seed=1)
    return [Req(f"r{number}", 1, "router", number, [1] * number, number, params) for number in range(count)]


def test_a_burst_adds_each_request_once() -> None:
    counted, reqs = Counted(), crowd(64)
    for here in range(len(reqs) + 1):
        assert counted.sum.of(reqs[:here], launched_step=3) == sum(range(here))
    assert counted.added == len(reqs)


def test_a_step_makes_the_sum_anew() -> None:
    counted, reqs = Counted(), crowd(4)
    counted.sum.of(reqs, launched_step=3)
    counted.sum.of(reqs, launched_step=4)
    assert counted.added == 8


def test_a_request_that_has_left_is_not_counted_any_more() -> None:
    counted, reqs = Counted(), crowd(4)
    counted.sum.of(reqs, launched_step=3)
    assert counted.sum.of([reqs[0], *reqs[2:]], launched_step=3) == 0 + 2 + 3


def test_a_sum_that_serves_some_steps_counts_those_that_left_and_those_that_came() -> None:
    counted, reqs = Counted(steps_kept=4), crowd(5)
    assert counted.sum.of(reqs[:4], launched_step=3) == 0 + 1 + 2 + 3
    assert counted.sum.of(reqs[1:], launched_step=6) == 0 + 1 + 2 + 3 + 4
    assert counted.added == 5
    assert counted.sum.of(reqs[2:], launched_step=7) == 2 + 3 + 4


def test_a_sum_that_is_forgotten_counts_nobody_who_left() -> None:
    counted, reqs = Counted(steps_kept=4), crowd(4)
    counted.sum.of(reqs, launched_step=3)
    counted.sum.forget()
    assert counted.sum.of(reqs[2:], launched_step=3) == 2 + 3


def test_the_list_that_was_summed_may_not_change_what_is_counted() -> None:
    counted, reqs = Counted(), crowd(4)
    here = reqs[:2]
    counted.sum.of(here, launched_step=3)
    here.append(reqs[2])
    assert counted.sum.of(reqs, launched_step=3) == sum(range(4))

"""Sums over the requests that are here: each request is added once until the sum is forgotten."""

from __future__ import annotations

from collections.abc import Sequence

from decode.present import KeptSum
from shared.batch.req import Req
from shared.wire.sampling_params import SamplingParams


class Counted:
    """A sum of prompt lengths, and how many requests were added to make it."""

    def __init__(self) -> None:
        self.added = 0
        self.sum = KeptSum(int, self._add)

    def _add(self, total: int, reqs: Sequence[Req]) -> int:
        self.added += len(reqs)
        return total + sum(req.prompt_len for req in reqs)


def crowd(count: int) -> list[Req]:
    params = SamplingParams(max_new_tokens=9, seed=1)
    return [Req(f"r{number}", 1, "router", number, [1] * number, number, params) for number in range(count)]


def test_a_burst_adds_each_request_once() -> None:
    counted, reqs = Counted(), crowd(64)
    for here, req in enumerate(reqs):
        assert counted.sum.of(reqs[:here]) == sum(range(here))
        counted.sum.came(req)
    assert counted.sum.of(reqs) == sum(range(64))
    assert counted.added == len(reqs)


def test_a_sum_that_is_forgotten_counts_nobody_who_left() -> None:
    counted, reqs = Counted(), crowd(4)
    counted.sum.of(reqs)
    counted.sum.forget()
    assert counted.sum.of([reqs[0], *reqs[2:]]) == 0 + 2 + 3


def test_one_that_comes_before_the_sum_is_made_is_counted_once() -> None:
    counted, reqs = Counted(), crowd(4)
    counted.sum.came(reqs[3])
    assert counted.sum.of(reqs) == sum(range(4))

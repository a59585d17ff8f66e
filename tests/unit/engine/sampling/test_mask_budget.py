"""Masks have a budget a step and a tenant: nobody's grammars hold up the others, and none of them starves."""

from __future__ import annotations

from collections import Counter

import pytest

from shared.engine.sampling.masks import (
    ALL_SECONDS,
    ALONE_SECONDS,
    TENANT_SECONDS,
    MaskBudget,
    MaskShares,
)


class Masks:
    """A budget whose masks take the seconds of their slots; slots of `bob` have no grammar."""

    def __init__(self, tenants: dict[int, str], seconds: float, portions: int = 1):
        self.now = 0.0
        self.budget = MaskBudget(lambda: self.now)
        self.tenants = tenants
        self.seconds = seconds
        self.portions = portions
        self.calls: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        for slot, tenant in tenants.items():
            self.budget.join(slot, tenant)

    def step(self, *, bounded: int | None = None) -> MaskShares:
        slots = list(self.tenants)
        rows = [row for row, slot in enumerate(slots) if self.tenants[slot] != "bob"]

        def compute(row: int, seconds: float) -> bool:
            assert seconds > 0
            self.now += self.seconds
            self.calls[slots[row]] += 1
            whole = self.calls[slots[row]] % self.portions == 0
            self.done[slots[row]] += whole
            return whole

        return self.budget.share(slots, rows, compute, bounded=bounded)


@pytest.mark.parametrize("seconds", [0.0001, 0.001, 0.01, 0.045])
def test_128_rows_of_one_tenant_cost_the_others_a_budget_and_a_call(seconds: float) -> None:
    masks = Masks({slot: "alice" if slot else "bob" for slot in range(129)}, seconds)
    steps = 200
    longest = 0.0
    for _ in range(steps):
        began = masks.now
        shares = masks.step()
        longest = max(longest, masks.now - began)
        assert sum(shares.seconds.values()) == pytest.approx(masks.now - began)
    assert longest < TENANT_SECONDS + seconds + 1e-9
    assert masks.now < steps * TENANT_SECONDS + seconds + 1e-9
    assert masks.now > min(steps * 128 * seconds, steps * TENANT_SECONDS) * 0.99


@pytest.mark.parametrize("portions", [1, 3])
def test_no_row_starves_and_all_get_about_as_many_tokens(portions: int) -> None:
    masks = Masks({slot: "alice" if slot else "bob" for slot in range(20)}, 0.003, portions)
    for _ in range(600):
        masks.step()
    assert set(masks.done) >= set(range(1, 20))
    each = [masks.done[slot] for slot in range(1, 20)]
    assert max(each) - min(each) <= 1


def test_a_tenant_alone_has_more_time_and_a_bound_all_the_same() -> None:
    masks = Masks(dict.fromkeys(range(128), "alice"), 0.01)
    shares = masks.step()
    assert ALONE_SECONDS <= masks.now <= ALONE_SECONDS + 0.01 + 1e-9
    assert len(shares.sat_out) == 128 - len(shares.seconds)
    cheap = Masks(dict.fromkeys(range(128), "alice"), 0.0001)
    assert not cheap.step().sat_out


def test_ordinary_masks_of_64_rows_beside_others_make_nobody_sit_out() -> None:
    masks = Masks({slot: "alice" if slot else "bob" for slot in range(65)}, 0.00005)
    assert not any(masks.step().sat_out for _ in range(50))


def test_one_tenants_grammars_take_no_time_from_anothers() -> None:
    tenants = dict.fromkeys(range(64), "alice") | {64: "carol", 65: "bob"}
    masks = Masks(tenants, 0.002)
    assert all(64 not in masks.step().sat_out for _ in range(50))
    assert masks.done[64] == 50


def test_many_tenants_together_have_a_bound_and_take_turns() -> None:
    masks = Masks({slot: f"tenant {slot}" for slot in range(40)}, 0.004)
    for _ in range(80):
        began = masks.now
        masks.step()
        assert masks.now - began < ALL_SECONDS + 0.004 + 1e-9
    each = [masks.done[slot] for slot in range(40)]
    assert min(each) > 0
    assert max(each) - min(each) <= 1


def test_a_debt_is_paid_by_steps_and_a_slot_that_is_taken_anew_goes_last() -> None:
    masks = Masks({0: "bob", 1: "alice", 2: "alice"}, 0.021)
    assert masks.step().sat_out == {2}
    waits = [len(masks.step().seconds) for _ in range(8)]
    assert waits == [0, 0, 0, 1, 0, 0, 0, 1]
    masks.budget.join(2, "alice")  # it was its turn
    while not (shares := masks.step()).seconds:
        pass
    assert shares.sat_out == {2}


def test_without_a_bound_all_are_computed() -> None:
    masks = Masks({slot: "alice" if slot else "bob" for slot in range(40)}, 0.1)
    assert not masks.step(bounded=0).sat_out
    assert set(masks.done) == set(range(1, 40))


def test_the_last_rows_of_a_step_are_computed_whatever_the_first_ones_take() -> None:
    masks = Masks({slot: "alice" if slot else "bob" for slot in range(40)}, 0.1)
    assert masks.step(bounded=30).sat_out == set(range(2, 30))
    assert set(masks.done) == {1, *range(30, 40)}

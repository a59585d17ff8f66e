"""Claims about the seconds that a router expects a prompt to take at a worker."""

from __future__ import annotations

from itertools import permutations
from math import inf

import pytest

from router.core.fleet.prompt_seconds import (
    FORGOTTEN_SECONDS,
    GROUPS_MAX,
    STEPS,
    STREAM_WEIGHT,
    PromptSeconds,
)
from router.core.fleet.told_rates import FASTEST, RATES_MAX, TELLERS_MAX, FleetRates, ToldRates
from router.core.fleet.worker import Worker
from shared.scheduling.step_cost import ExtendRate
from shared.wire.messages import Hello, Limits, Load, WorkerRole


def worker(
    role: WorkerRole = "prefill",
    model: str = "m",
    uid: str = "",
    rates: FleetRates | None = None,
    **load: float,
) -> Worker:
    """One that has told this load."""
    limits = Limits(4096, 16, 400, 8, 256, 64)
    hello = Hello(
        session=0,
        role=role,
        uid=uid or f"{role} {model}",
        epoch=1,
        model_name=model,
        limits=limits,
        understands=("Serve",),
    )
    made = Worker(hello.uid, hello, 1, rates=rates or FleetRates())
    made.report(Load(free_pages=400, slots_free=8, **load))  # type: ignore[arg-type]
    return made


def test_what_is_queued_and_what_is_not_cached_is_computed_at_the_rate_told() -> None:
    busy = worker(extend_rate=100.0, queued_tokens=50)
    assert PromptSeconds(1.0).computed(busy, 200, 50) == pytest.approx((50 + 150) / 100)
    assert PromptSeconds(1.0).computed(worker("decode", extend_rate=50.0, queued_tokens=50), 200, 50) == 4.0


def test_what_is_not_cached_counts_for_more_than_what_is_queued() -> None:
    busy = worker("decode", extend_rate=100.0, queued_tokens=50)
    assert PromptSeconds(2.0).computed(busy, 200, 50) == pytest.approx((50 + 2 * 150) / 100)
    other = worker("decode", extend_rate=100.0, queued_tokens=150)
    assert PromptSeconds(2.0).computed(other, 200, 190) < PromptSeconds(2.0).computed(busy, 200, 50)


def test_later_tokens_of_a_prompt_take_longer() -> None:
    slow = worker(extend_rate=100.0, position_seconds=0.001)
    assert PromptSeconds(1.0).computed(slow, 4, 1) == pytest.approx(3 / 100 + 0.001 * (1 + 2 + 3))


def test_a_worker_that_has_told_no_rate_is_as_fast_as_the_others_of_its_model() -> None:
    seconds, rates = PromptSeconds(1.0), FleetRates()
    assert seconds.computed(worker(rates=rates), 100, 0) == inf
    assert seconds.computed(worker(rates=rates, extend_rate=100.0), 100, 0) == 1.0
    assert seconds.computed(worker("decode", rates=rates), 100, 0) == 1.0
    assert seconds.computed(worker("decode", model="another", rates=rates), 100, 0) == inf


def test_a_fetch_takes_what_the_last_fetches_of_its_kv_group_took() -> None:
    seconds, group = PromptSeconds(1.0), ("model", "format")
    assert seconds.fetched(group, 1000, now=0.0) == 0.0
    seconds.observe_fetch(group, 500, 1.0, now=0.0)
    assert seconds.fetched(group, 1000, now=0.0) == 2.0
    for _ in range(100):
        seconds.observe_fetch(group, 500, 0.5, now=0.0)
    assert seconds.fetched(group, 1000, now=0.0) == pytest.approx(1.0, rel=0.01)
    seconds.observe_fetch(group, -3, 100.0, now=0.0)
    assert seconds.fetched(group, 1000, now=0.0) == pytest.approx(1.0, rel=0.01)
    assert seconds.fetched(("model", "another format"), 1000, now=0.0) == 0.0


def test_a_fetch_has_a_part_that_does_not_grow_with_its_tokens() -> None:
    seconds, group = PromptSeconds(1.0), ("model", "format")
    for tokens in (100, 200, 100, 300):
        seconds.observe_fetch(group, tokens, 0.05 + 0.0001 * tokens, now=0.0)
    assert seconds.fetched(group, 3000, now=0.0) == pytest.approx(0.05 + 0.3)
    assert seconds.fetched(group, 0, now=0.0) == pytest.approx(0.05)


def test_a_fetch_of_more_tokens_never_takes_less_time() -> None:
    seconds, group = PromptSeconds(1.0), ("model", "format")
    for tokens, took in ((100, 1.0), (1000, 0.1), (200, 0.8), (500, 0.2)):
        seconds.observe_fetch(group, tokens, took, now=0.0)
    assert 0.1 < seconds.fetched(group, 50, now=0.0) <= seconds.fetched(group, 5000, now=0.0) < 1.0


def test_a_prompt_beside_streams_waits_for_two_steps_and_pays_for_what_they_wait() -> None:
    alone = worker("decode", extend_rate=100.0, extend_rate_alone=200.0, step_seconds=0.5)
    beside = worker("decode", extend_rate=100.0, extend_rate_alone=200.0, step_seconds=0.5, running=8)
    seconds = PromptSeconds(1.0)
    others = 8 * 150 / 200
    assert seconds.computed(alone, 200, 50) == 1.5
    assert seconds.computed(beside, 200, 50) == pytest.approx(1.5 + STEPS * 0.5 + STREAM_WEIGHT * others)
    batch = worker("prefill", extend_rate=100.0, step_seconds=0.5, running=8)
    assert seconds.computed(batch, 200, 50) == 1.5, "no stream waits for a pass at prefill"


def test_what_fetches_took_is_forgotten_while_nothing_travels() -> None:
    seconds, group = PromptSeconds(1.0), ("model", "format")
    seconds.observe_fetch(group, 500, 4.0, now=10.0)
    assert seconds.fetched(group, 500, now=10.0) == 4.0
    assert seconds.fetched(group, 500, now=10.0 + FORGOTTEN_SECONDS) == 2.0
    assert seconds.fetched(group, 500, now=10.0 + 10 * FORGOTTEN_SECONDS) < 0.01, "prefill is tried again"


def test_a_new_worker_is_as_fast_as_the_others_of_its_role_without_streams() -> None:
    seconds, rates = PromptSeconds(1.0), FleetRates()
    worker("decode", rates=rates, extend_rate=10.0, extend_rate_alone=50.0)
    prefill, decode = worker("prefill", rates=rates), worker("decode", rates=rates)
    assert seconds.computed(prefill, 100, 0) == 2.0, "no prefill worker has told one"
    worker("prefill", rates=rates, extend_rate=100.0)
    assert (seconds.computed(prefill, 100, 0), seconds.computed(decode, 100, 0)) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("rate", "alone", "takes"), [(1e12, 0.0, 1.0), (1e12, 101.0, 1.0), (101.0, 1e12, float(FASTEST))]
)
def test_a_rate_counts_for_no_more_than_a_few_times_that_of_most_others(
    rate: float, alone: float, takes: float
) -> None:
    seconds, tokens, rates = PromptSeconds(1.0), FASTEST * 101, FleetRates()
    for number, told in enumerate((99.0, 100.0, 101.0)):
        worker("decode", uid=f"d{number}", rates=rates, extend_rate=told)
    liar = worker("decode", uid="liar", rates=rates, extend_rate=rate, extend_rate_alone=alone)
    assert seconds.computed(liar, tokens, 0) == takes
    assert seconds.computed(worker("decode", uid="new", rates=rates), tokens, 0) >= 1.0, "nor for a newcomer"
    for other in (
        worker("decode", model="another", rates=rates, extend_rate=1e12),
        worker("prefill", uid="prefill", rates=rates, extend_rate=1e12),
    ):
        assert seconds.computed(other, tokens, 0) < 0.1, "others are not compared"


def test_a_worker_that_is_idle_is_compared_with_what_others_do_without_streams() -> None:
    rates = FleetRates()
    for number in range(3):
        worker("decode", uid=f"d{number}", rates=rates, extend_rate=1.0, extend_rate_alone=100.0)
    idle = worker("decode", uid="idle", rates=rates, extend_rate=100.0)
    assert PromptSeconds(1.0).computed(idle, 100, 0) == 1.0


def test_the_rates_that_are_compared_are_those_of_the_last_workers() -> None:
    told = ToldRates()
    for number in range(10 * TELLERS_MAX):
        told.add(f"old {number}", "", ExtendRate(1.0, 0.0))
    assert (len(told.tellers), told.most) == (TELLERS_MAX, FASTEST)
    for number in range(10 * TELLERS_MAX):
        told.add("alone", str(number), ExtendRate(1000.0, 0.0))
    assert told.most == FASTEST, "one worker is one, however often it tells"
    for number in range(TELLERS_MAX):
        told.add(f"new {number}", "", ExtendRate(1000.0, 0.0))
    assert told.most == FASTEST * 1000


@pytest.mark.parametrize("order", list(permutations((10.0, 100.0, 1000.0))))
def test_in_whatever_order_workers_tell_a_new_one_is_as_fast_as_those_in_the_middle(
    order: tuple[float, ...],
) -> None:
    rates = FleetRates()
    for rate in order:
        worker(uid=f"w{rate}", rates=rates, extend_rate=rate, position_seconds=0.001 / rate)
    positions = 0.001 / 100 * sum(range(100))
    assert PromptSeconds(1.0).computed(worker(rates=rates), 100, 0) == pytest.approx(1.0 + positions)


def test_models_and_groups_that_come_and_go_are_forgotten() -> None:
    seconds, rates = PromptSeconds(1.0), FleetRates()
    for number in range(GROUPS_MAX + 1):
        seconds.observe_fetch(("model", str(number)), 1, 1.0, now=0.0)
    assert seconds.fetched(("model", "0"), 1, now=0.0) == 0.0
    assert seconds.fetched(("model", "1"), 1, now=0.0) == 1.0
    for number in range(RATES_MAX + 1):
        worker(model=str(number), rates=rates, extend_rate=1.0)
    assert seconds.computed(worker(model="0", rates=rates), 1, 0) == inf
    assert seconds.computed(worker(model="1", rates=rates), 1, 0) == 1.0

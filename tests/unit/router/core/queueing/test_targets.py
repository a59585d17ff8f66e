"""A first token within a time: refused at once where that is foreseen to fail, dropped only before it is computed."""

from __future__ import annotations

import dataclasses

import pytest

from router.core.effects import ClientRequest, RequestFailed
from router.core.queueing.admission import target_of
from shared.wire.messages import Prefill
from tests.unit.router.core.queueing.test_backpressure import Overload
from tests.unit.router.deployment import ScriptedDeployment, request


def within(rid: str, seconds: float) -> ClientRequest:
    return dataclasses.replace(request(rid), deadline_seconds=seconds)


def with_a_line(ttft_target_seconds: float = 0.0) -> Overload:
    """Ten a second are taken, and so many wait that a new request waits for seconds."""
    world = Overload(ready_seconds=0.5, waiting_seconds_max=100.0, ttft_target_seconds=ttft_target_seconds)
    world.come(10)
    world.serve(10.0, per_second=10, arrivals=2)
    return world


def test_a_request_whose_first_token_would_come_too_late_is_refused_at_once() -> None:
    world = with_a_line(2.0)
    failed = world.refusal(world.come(20)[-1])
    assert failed is not None
    assert (failed.status, failed.code) == (429, "target_missed")
    assert "within 2 s" in failed.message
    assert world.core.counters.targets["refused"] >= 1


def test_the_least_of_the_targets_counts_and_who_has_none_waits() -> None:
    world = with_a_line()
    (patient,) = world.come(1)
    assert world.refusal(patient) is None
    world.submit(within("hurried", 1.0))
    failed = world.refusal("hurried")
    assert failed is not None
    assert failed.code == "target_missed"
    for own, deployment, least in ((1.0, 2.0, 1.0), (3.0, 2.0, 2.0), (0.0, 2.0, 2.0), (3.0, 0.0, 3.0)):
        asked = dataclasses.replace(request("r"), deadline_seconds=own)
        settings = world.core.settings.model_copy(update={"ttft_target_seconds": deployment})
        assert target_of(asked, settings) == least


def test_without_a_rate_nothing_is_refused_and_what_is_too_late_is_dropped_before_it_is_computed() -> None:
    world = ScriptedDeployment(0, 1)
    world.submit(within("r", 0.5))
    assert world.state("r") == "waiting"
    world.wait(0.4)
    assert world.state("r") == "waiting"
    world.wait(0.1)
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert (outcome.status, outcome.code) == (503, "target_missed")
    assert "within 0.5 s" in outcome.message
    assert world.core.counters.targets["dropped"] == 1


def test_what_is_computed_is_never_dropped_and_counts_as_missed() -> None:
    world = ScriptedDeployment(1, 1)
    world.submit(within("r", 0.5))
    world.wait(1.0)
    assert world.state("r") == "prefilling"
    world.prefilled("p0", "r", 10)
    assert world.core.counters.targets["missed"] == 1
    world.wait(1.0)
    assert world.state("r") == "decoding"


def test_a_target_counts_from_the_arrival_also_for_a_request_that_lost_its_worker() -> None:
    world = ScriptedDeployment(1, 1)
    world.submit(within("r", 0.5))
    world.wait(0.6)
    world.refused("p0", "r", "no_room")
    assert len(world.sent(Prefill)) == 1
    world.wait(0.0)
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert outcome.code == "target_missed"


def test_a_clock_that_stands_still_refuses_nobody() -> None:
    world = Overload(ttft_target_seconds=1.0)
    rids = world.come(50)
    assert all(world.refusal(rid) is None for rid in rids)


def test_one_tenant_that_floods_is_told_at_once_what_it_waits_for_behind_the_others() -> None:
    """Others come meanwhile whose turn is before its own: its requests leave the queue at their own rate."""
    world = Overload(ready_seconds=0.5, waiting_seconds_max=100.0)
    world.come(10, "flood")
    for _ in range(60):
        world.come(1, "other")
        world.serve(0.2, per_second=10, arrivals=2, tenant="flood")
    queue = world.core._reservations.waiting
    tenant = world.core._requests.find_tenant("flood", world.now)
    own = world.core._backpressure._tenants["flood"].per_second(world.now, 10.0)
    assert own is not None
    assert own == pytest.approx(5.0, rel=0.3), "of ten a second half are the others'"
    asked = request("next", tenant="flood")
    seconds = world.core._backpressure.seconds_to_wait(queue, asked, tenant, world.now)
    assert seconds >= tenant.waiting / own

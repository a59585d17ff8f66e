"""The gap before the second token, in parts."""

from __future__ import annotations

import pytest

from tests.unit.router.deployment import ScriptedDeployment, request


def parts_of(world: ScriptedDeployment) -> dict[str, float]:
    shown = world.core.debug("r")
    assert shown is not None
    parts = shown["second_token_milliseconds"]
    assert isinstance(parts, dict)
    return parts


def test_the_parts_of_the_gap_are_where_the_request_was() -> None:
    world = ScriptedDeployment(1, 1)
    world.loaded("d0", slots_free=0)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.wait(0.3)
    world.loaded("d0", step_seconds=0.03)
    world.wait(0.02)
    world.joined("d0", "r")  # the fetch took 10 ms of them
    world.wait(0.05)
    world.generated("d0", "r", 1, 11)
    expected = {"queue": 300.0, "fetch": 10.0, "joining": 30.0, "first_step": 30.0}
    assert parts_of(world) == pytest.approx(expected)
    counters = world.core.counters
    assert list(counters.second_token_queue) == pytest.approx([0.3])
    assert list(counters.second_token_seconds) == pytest.approx([sum(expected.values()) / 1000])


def test_a_worker_that_tells_no_step_leaves_it_to_joining() -> None:
    world = ScriptedDeployment(1, 1)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.wait(0.01)
    world.joined("d0", "r")
    world.wait(0.05)
    world.generated("d0", "r", 1, 11)
    assert parts_of(world) == pytest.approx({"queue": 0.0, "fetch": 10.0, "joining": 50.0, "first_step": 0.0})


def test_a_second_token_of_another_attempt_is_of_no_hand_over() -> None:
    world = ScriptedDeployment(1, 2)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.joined("d0", "r")
    world.down("d0")
    world.prefilled("p0", "r", 11, attempt=2, index=1)
    assert parts_of(world) == {}

"""What held a stream up, as `segue_pause_seconds` says it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.core.counters import PauseCause
from shared.wire.messages import Draining, Paused, Prefill
from tests.unit.router.deployment import ScriptedDeployment, decoding, request


def retract(world: ScriptedDeployment) -> None:
    world.say("d0", Paused("r", 1, "retracted"))
    world.wait(3)
    world.generated("d0", "r", 2, 12)


def return_for_lack_of_host_memory(world: ScriptedDeployment) -> None:
    world.refused("d0", "r", "stale")
    world.wait(3)
    world.prefilled(world.sent(Prefill, "r")[-1][0], "r", 12, attempt=2, index=2)


def lose_decode(world: ScriptedDeployment) -> None:
    world.down("d0")
    world.wait(3)
    world.prefilled(world.sent(Prefill, "r")[-1][0], "r", 12, attempt=2, index=2)


def move(world: ScriptedDeployment) -> None:
    world.say("d0", Draining())
    world.migrating("d0", "r", 2)
    world.wait(3)
    world.generated("d1", "r", 2, 12)


def say_nothing(world: ScriptedDeployment) -> None:
    world.wait(3)
    world.generated("d0", "r", 2, 12)


@pytest.mark.parametrize(
    ("happens", "cause"),
    [
        (retract, "retracted"),
        (return_for_lack_of_host_memory, "retracted"),
        (lose_decode, "lost_decode"),
        (move, "moved"),
        (say_nothing, "other"),
    ],
)
def test_a_pause_is_told_by_its_cause_when_the_stream_goes_on(
    happens: Callable[[ScriptedDeployment], None], cause: PauseCause
) -> None:
    world = decoding()
    happens(world)
    assert list(getattr(world.core.counters, f"pauses_{cause}")) == [3]
    before = world.core.counters.pauses_other.copy()
    world.wait(0.9)
    assert world.core.counters.pauses_other == before


def test_a_second_token_that_waits_for_room_is_a_pause() -> None:
    world = ScriptedDeployment()
    world.loaded("d0", slots_free=0)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.wait(2)
    world.loaded("d0")
    world.joined("d0", "r")
    world.generated("d0", "r", 1, 11)
    assert list(world.core.counters.pauses_no_room) == [2]


def test_a_retracted_stream_has_not_stalled() -> None:
    world = decoding(stall_seconds=10.0)
    for _ in range(10):
        world.say("d0", Paused("r", 1, "retracted"))
        world.wait(5)
    assert world.state("r") == "decoding"
    world.wait(11)
    assert world.core.counters.continuations["stalled"] == 1

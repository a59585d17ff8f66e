"""Prompts that wait for the decode worker which has them sooner: for how long, and what they leave to others."""

from __future__ import annotations

import msgspec

from router.core.queueing.backfill import CHOOSING_MAX
from shared.wire.messages import Prefill, Serve
from tests.unit.router.core.queueing.test_local_prompts import LONG, WHOLE, begun, deployment, shared_prompt
from tests.unit.router.deployment import ScriptedDeployment, request


def test_a_few_tokens_that_own_workers_have_are_no_reason_to_wait_for_one() -> None:
    world = deployment(decode=2)
    for _ in range(200):
        world.core.fleet.prefixes.looked("m", "decode", found=True, share=0.05)
    world.loaded("d0", extend_rate=1_000.0, queued=1, queued_tokens=256)  # another router's: it has no turn
    for number in range(1, 9):
        world.loaded("d1", extend_rate=1_000.0)
        world.submit(request(f"r{number}", shared_prompt(number)))
        assert world.placed(Serve, f"r{number}") == "d1"
        begun(world, f"r{number}", peer="d1", finish="length")


def test_an_idle_decode_worker_gets_what_has_waited_as_long_as_it_takes_longer_there() -> None:
    world = deployment(decode=2)
    for number in range(2):
        world.loaded(f"d{number}", extend_rate=1_000.0)
    world.submit(request("a", shared_prompt(1)))
    here = world.placed(Serve, "a")
    assert here is not None
    begun(world, "a", peer=here, finish="length")
    world.loaded(here, extend_rate=1_000.0, queued=1, queued_tokens=256)  # another router's: it has no turn
    world.submit(request("b", shared_prompt(1)))
    assert not world.sent(Serve, "b")
    sooner, later = (256 + 2) / 1_000, 2 * 960 / 1_000
    world.wait(later - 1.2 * sooner - 0.001)
    assert not world.sent(Serve, "b")
    world.wait(0.002)
    assert world.placed(Serve, "b") == ({"d0", "d1"} - {here}).pop()


def test_a_prompt_waits_for_no_better_worker_that_never_has_a_turn() -> None:
    world = deployment(decode=2, waiting_seconds_max=30.0)
    for number in range(2):
        world.loaded(f"d{number}", running=1, extend_rate=100.0, queued=1, queued_tokens=100)
    world.up("decode", "d2", limits=msgspec.structs.replace(WHOLE, extend_tokens=1), understands=("Serve",))
    world.loaded("d2", extend_rate=100_000.0, queued=4, queued_tokens=4)
    world.submit(request("r", LONG[:99]))
    world.wait(14.9)
    assert world.state("r") == "waiting"
    world.wait(0.2)
    assert world.placed(Serve, "r") in ("d0", "d1")


def test_a_prompt_waits_for_a_better_worker_no_longer_than_half_of_the_time_that_it_has() -> None:
    world = deployment(decode=2, waiting_seconds_max=4.0)
    world.loaded("d0", extend_rate=100_000.0, queued=4, queued_tokens=1_000)
    world.loaded("d1", running=1, extend_rate=10.0, queued=1, queued_tokens=100)
    world.submit(request("r", LONG[:99]))
    world.wait(1.9)
    assert world.state("r") == "waiting"
    world.wait(0.2)
    assert world.placed(Serve, "r") == "d1"


def test_what_was_put_back_waits_on_for_a_better_worker_and_not_anew() -> None:
    world, here = waits_for_its_prefix(idle=1, no_room_seconds=0.1)
    idle = ({"d0", "d1"} - {here}).pop()
    world.wait(1.0)
    world.loaded(here, extend_rate=1_000.0)
    world.loaded(idle, extend_rate=1_000.0, queued=1, queued_tokens=256)
    assert world.placed(Serve, "hot") == here
    world.refused(here, "hot", "no_room")
    world.loaded(here, extend_rate=1_000.0, queued=1, queued_tokens=256)
    world.wait(0.2)
    world.loaded(idle, extend_rate=1_000.0)
    assert world.placed(Serve, "hot") == here
    world.wait(0.42)
    assert world.placed(Serve, "hot") == idle


def waits_for_its_prefix(
    idle: int, backfill_max: int = 32, no_room_seconds: float = 1.0
) -> tuple[ScriptedDeployment, str]:
    """The prompt `hot` waits for the worker that has its prefix, and that has no turn; so many others are idle."""
    world = deployment(decode=1 + idle, backfill_max=backfill_max, no_room_seconds=no_room_seconds)
    for _ in range(200):
        world.core.fleet.prefixes.looked("m", "decode", found=False, share=0.0)
    for number in range(1 + idle):
        world.loaded(f"d{number}", extend_rate=1_000.0)
    world.submit(request("a", shared_prompt(1)))
    here = world.placed(Serve, "a") or ""
    begun(world, "a", peer=here, finish="length")
    world.loaded(here, extend_rate=1_000.0, queued=1, queued_tokens=256)
    world.submit(request("hot", shared_prompt(1)))
    assert world.state("hot") == "waiting"
    return world, here


def test_what_waits_for_a_better_worker_holds_back_no_other_prompt_of_its_tenant() -> None:
    world, here = waits_for_its_prefix(idle=1)
    world.submit(request("cold", shared_prompt(2, tokens=1_000)))
    assert world.placed(Serve, "cold") == ({"d0", "d1"} - {here}).pop()
    assert world.state("hot") == "waiting"


def test_no_room_is_kept_for_what_waits_for_a_better_worker() -> None:
    world, here = waits_for_its_prefix(idle=2, backfill_max=4)
    for number in range(8):
        world.submit(request(f"r{number}", shared_prompt(2 + number, tokens=20), tenant=f"t{number}"))
        there = world.placed(Serve, f"r{number}")
        assert there not in (None, here), "it wants another worker"
        begun(world, f"r{number}", peer=there, finish="length")
    assert world.state("hot") == "waiting"


def test_behind_many_that_wait_for_a_better_worker_only_other_tenants_are_tried() -> None:
    world, here = waits_for_its_prefix(idle=1)
    for number in range(1, CHOOSING_MAX):
        world.submit(request(f"hot{number}", shared_prompt(1)))
    for tenant in ("", "other"):
        world.submit(request(f"cold {tenant}", shared_prompt(2), tenant=tenant))
    assert [world.state(f"cold {tenant}") for tenant in ("", "other")] == ["waiting", "extending"]
    world.loaded(here, extend_rate=1_000.0)
    assert [served.rid for _, served in world.sent(Serve)][2:4] == ["hot", "hot1"]


def with_prefill_queue(waiting_seconds_max: float = 30.0) -> ScriptedDeployment:
    """A prefill worker with a queue of two seconds, and a decode worker without a turn that has it sooner."""
    world = deployment(prefill=1, local_prefill="short", waiting_seconds_max=waiting_seconds_max)
    world.loaded("p0", extend_rate=1_000.0, queued=3, queued_tokens=2_000)
    world.loaded("d0", extend_rate=1_000.0, queued=1, queued_tokens=256)
    return world


def test_a_prompt_waits_for_a_turn_at_decode_rather_than_in_the_queue_of_prefill() -> None:
    world = with_prefill_queue()
    world.submit(request("r", LONG))
    assert world.state("r") == "waiting"
    world.loaded("d0", extend_rate=1_000.0, queued_tokens=100)
    assert world.placed(Serve, "r") == "d0"


def test_it_goes_to_prefill_once_it_has_it_as_soon() -> None:
    world = with_prefill_queue()
    world.submit(request("r", LONG))
    assert world.state("r") == "waiting"
    world.loaded("p0", extend_rate=1_000.0, queued=1, queued_tokens=200)
    world.loaded("d0", extend_rate=1_000.0, queued=1, queued_tokens=255)
    assert world.placed(Prefill, "r") == "p0"


def test_it_waits_for_no_turn_at_decode_beyond_half_of_its_time() -> None:
    world = with_prefill_queue(waiting_seconds_max=4.0)
    world.submit(request("r", LONG))
    world.wait(1.9)
    assert world.state("r") == "waiting"
    world.wait(0.2)
    assert world.placed(Prefill, "r") == "p0"


def test_an_idle_prefill_worker_gets_what_has_waited_as_long_as_it_takes_longer_there() -> None:
    world = deployment(prefill=1, local_prefill="short")
    for _ in range(200):
        world.core.fleet.prefixes.looked("m", "prefill", found=False, share=0.0)
    world.loaded("p0", extend_rate=100.0)
    world.loaded("d0", extend_rate=1_000.0, queued=1, queued_tokens=256)
    world.submit(request("r", LONG))
    later, sooner = (
        world.core._local_prompts._seconds.computed(world.core.fleet.workers[uid], len(LONG), 0)
        for uid in ("p0", "d0")
    )
    world.wait(later - sooner - 0.01)
    assert world.state("r") == "waiting"
    world.wait(0.02)
    assert world.placed(Prefill, "r") == "p0"


def test_it_waits_for_no_turn_of_a_handful_while_another_worker_of_the_fleet_has_one() -> None:
    world = deployment(prefill=1, decode=6, local_prefill="short", candidates_max=1)
    world.loaded("p0", extend_rate=1_000.0, queued=3, queued_tokens=2_000)
    for number in range(5):
        world.loaded(f"d{number}", extend_rate=1_000.0, queued=1, queued_tokens=256)
    for number in range(8):
        world.loaded("d5", extend_rate=1_000.0)
        world.submit(request(f"r{number}", LONG))
        assert world.placed(Serve, f"r{number}") == "d5"
        begun(world, f"r{number}", peer="d5", finish="length")


def test_one_that_waits_rather_than_go_where_it_has_failed_holds_back_no_other() -> None:
    world = deployment(decode=2)
    world.submit(request("r", LONG[:20]))
    failed = world.placed(Serve, "r") or ""
    [other] = {"d0", "d1"} - {failed}
    world.loaded(other, running=1, queued_tokens=500)
    world.refused(failed, "r", "internal")
    world.submit(request("larger", LONG))
    assert [world.state(rid) for rid in ("r", "larger")] == ["waiting", "extending"]
    assert world.placed(Serve, "larger") == failed

"""Pages that a decode worker must have for a prompt to compute, and what a tenant with nothing there needs."""

from __future__ import annotations

from router.core.fleet.refused_tenants import REFUSED_LOADS, REFUSED_MAX
from shared.wire.messages import Serve
from tests.unit.router.core.queueing.test_local_prompts import LONG, begun, deployment
from tests.unit.router.deployment import LIMITS, request


def test_a_prompt_is_begun_only_where_pages_are_left_beside_what_grows() -> None:
    world = deployment(waiting_seconds_max=5.0)
    world.submit(request("first"))
    begun(world, "first")
    world.loaded("d0", running=1, pages_for_new=9)
    world.submit(request("r", LONG))
    assert world.state("r") == "waiting"
    world.loaded("d0", running=1, pages_for_new=10)
    assert world.state("r") == "extending"


def test_a_tenant_with_nothing_at_a_worker_needs_only_free_pages_there() -> None:
    world = deployment(waiting_seconds_max=5.0)
    world.submit(request("first of many", tenant="greedy"))
    begun(world, "first of many")
    world.loaded("d0", running=1, free_pages=10, pages_for_new=0)
    world.submit(request("one more", LONG, tenant="greedy"))
    world.submit(request("modest", LONG, tenant="modest"))
    assert [world.state(rid) for rid in ("one more", "modest")] == ["waiting", "extending"]


def test_it_needs_no_more_where_others_are_there_from_another_router_alone() -> None:
    world = deployment(waiting_seconds_max=5.0)
    world.loaded("d0", running=3, free_pages=400, pages_for_new=0)
    world.submit(request("modest", LONG, tenant="modest"))
    assert world.state("modest") == "extending"


def test_one_that_grows_beyond_an_even_share_there_waits_for_pages_beside_what_grows() -> None:
    world = deployment()
    others = {"running": 3, "free_pages": 400, "pages_for_new": 0}
    world.loaded("d0", **others)
    even = LIMITS.pages * LIMITS.page_size // 3
    for rid, tokens in (("large", even + 2), ("small", even + 1)):
        world.submit(request(rid, LONG, max_new_tokens=tokens - len(LONG), tenant=rid))
    assert [world.state(rid) for rid in ("large", "small")] == ["waiting", "extending"]


def test_a_worker_that_has_refused_a_tenant_is_asked_again_when_it_has_told_many_loads() -> None:
    world = deployment()
    others = {"running": 3, "free_pages": 400, "pages_for_new": 0}
    world.loaded("d0", **others)
    world.submit(request("r", LONG))
    world.refused("d0", "r", "no_room")
    for number in range(REFUSED_LOADS - 1):
        world.wait(0.1)
        world.loaded("d0", **others, running_tokens=number)
    assert len(world.sent(Serve, "r")) == 1
    world.submit(request("of another", tenant="another"))
    assert world.state("of another") == "extending"
    world.loaded("d0", **others)
    assert len(world.sent(Serve, "r")) == 2
    world.refused("d0", "r", "no_room")
    world.wait(1.0)
    world.loaded("d0", **others | {"pages_for_new": 10})
    assert len(world.sent(Serve, "r")) == 3, "there are pages beside what grows"


def test_of_tenants_that_a_worker_refused_the_last_are_remembered() -> None:
    world = deployment()
    refused = world.core.fleet.workers["d0"].refused
    for number in range(REFUSED_MAX + 1):
        world.submit(request(f"r{number}", tenant=f"t{number}"))
        world.refused("d0", f"r{number}", "no_room")
        world.wait(1.0)
        world.cancel(f"r{number}")
    remembered = [f"t{number}" in refused for number in range(REFUSED_MAX + 1)]
    assert remembered == [False, *[True] * REFUSED_MAX]


def test_it_gets_them_as_soon_as_the_worker_tells_of_others_and_not_by_what_is_placed_behind_it() -> None:
    world = deployment(waiting_seconds_max=5.0)
    world.loaded("d0", free_pages=20, pages_for_new=5)
    world.submit(request("first", tenant="greedy"))
    world.submit(request("modest", LONG, tenant="modest"))
    world.submit(request("small", tenant="greedy"))
    assert [world.state(rid) for rid in ("first", "modest", "small")] == ["extending", "waiting", "extending"]
    told = {"running": 2, "queued_tokens": 6, "slots_free": 2, "pages_arriving": 2}
    world.loaded("d0", free_pages=18, pages_for_new=0, **told)
    assert world.state("modest") == "extending"

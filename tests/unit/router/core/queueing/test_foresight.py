"""A prompt is begun only where decode will have pages for it: else its stream stands still after its first token."""

from __future__ import annotations

from router.core.effects import RequestFailed
from shared.wire.messages import Decode, Foreseen, Prefill
from tests.unit.router.deployment import LIMITS, ScriptedDeployment, decoding, request

LONG = tuple(range(1, 161))  # ten pages


def crowded(
    decode: int = 1, *, pages_for_new: int, pages_a_second: float = 0.0, **settings: object
) -> ScriptedDeployment:
    """Decode workers that have a request of another router, and say what they could give to a new one."""
    settings = {"prefill_policy": "round_robin", **settings}  # the first prompt goes to p0
    world = ScriptedDeployment(2, decode, limits=LIMITS, **settings)
    for number in range(decode):
        tells(world, f"d{number}", pages_for_new, pages_a_second)
        world.core.fleet.workers[f"d{number}"].refused.add(
            "", 0
        )  # the tenant has much there from the other router
    return world


def tells(world: ScriptedDeployment, uid: str, pages_for_new: int, pages_a_second: float = 0.0) -> None:
    world.loaded(uid, running=1, pages_for_new=pages_for_new, pages_a_second=pages_a_second)


def test_a_prompt_waits_until_decode_has_pages_for_it_and_hears_503_before_its_first_token() -> None:
    world = crowded(pages_for_new=9, waiting_seconds_max=5.0)
    world.submit(request("late", LONG))
    world.wait(4)
    assert world.sent(Prefill) == []
    tells(world, "d0", 10)
    assert world.state("late") == "prefilling"
    tells(world, "d0", 9)
    world.submit(request("never", LONG))
    world.wait(5)
    outcome = world.outcome("never")
    assert isinstance(outcome, RequestFailed)
    assert (outcome.status, world.output("never")) == (503, [])


def test_what_comes_back_within_ready_seconds_counts() -> None:
    """Half of `ready_seconds` count, and the own share of what is there: all, for what is here is of this router."""
    world = crowded(pages_for_new=40, ready_seconds=2.0)
    world.submit(request("own", LONG))
    world.prefilled("p0", "own", 10)
    world.joined("d0", "own")
    tells(world, "d0", 4, 5.9)
    world.submit(request("r", LONG))
    assert world.state("r") == "waiting"
    tells(world, "d0", 4, 6.0)
    assert world.state("r") == "prefilling"


def test_of_what_comes_back_to_all_routers_one_counts_its_own_share() -> None:
    world = crowded(pages_for_new=40, ready_seconds=2.0)
    world.submit(request("own", LONG))
    world.prefilled("p0", "own", 10)
    world.joined("d0", "own")
    others = {"running": 2, "pages_for_new": 4}
    world.loaded("d0", pages_a_second=11.9, **others)
    world.submit(request("r", LONG))
    assert world.state("r") == "waiting"
    world.loaded("d0", pages_a_second=12.0, **others)
    assert world.state("r") == "prefilling"


def test_its_own_share_is_that_of_the_whole_fleet_and_not_of_a_handful() -> None:
    world = crowded(4, pages_for_new=40, ready_seconds=2.0, candidates_max=1)
    world.submit(request("own", LONG))
    world.prefilled("p0", "own", 10)
    here = world.placed(Decode, "own") or ""
    world.joined(here, "own")
    for number in range(4):
        tells(world, f"d{number}", 4, 6.0 if f"d{number}" == here else 0.0)
    for number in range(12):
        world.submit(request(f"r{number}", LONG))
        assert world.state(f"r{number}") == "waiting"
        world.cancel(f"r{number}")
    tells(world, here, 4, 24.0)
    world.submit(request("r", LONG))
    assert world.state("r") == "prefilling"


def test_what_is_placed_in_a_pass_does_not_change_its_own_share() -> None:
    world = crowded(2, pages_for_new=4, pages_a_second=12.0, ready_seconds=2.0)
    world.submit(request("r", LONG))
    foresight, live = world.core._foresight, world.core.requests["r"]
    kv_group = world.core.fleet.workers["d0"].kv_group
    world.core.fleet.workers["d1"].assign("behind", 3, 1)
    assert kv_group not in foresight.readers(live, [kv_group])
    foresight.begin_pass()
    assert kv_group in foresight.readers(live, [kv_group])


def test_a_tenant_with_nothing_there_begins_as_pages_come_free_where_no_slot_does() -> None:
    world = crowded(pages_for_new=40, balance_steps=0)
    world.submit(request("own", tenant="greedy"))
    world.prefilled("p0", "own", 10)
    world.joined("d0", "own")
    full = {"running": 4, "slots_free": 0, "pages_for_new": 0}
    world.loaded("d0", free_pages=9, **full)
    world.submit(request("r", LONG, tenant="modest"))
    assert world.state("r") == "waiting"
    world.loaded("d0", free_pages=10, **full)
    assert world.state("r") == "prefilling"


def test_what_other_routers_have_begun_is_in_front_until_it_is_there() -> None:
    world = crowded(pages_for_new=12)
    told = {"running": 1, "pages_for_new": 12}
    world.loaded("d0", pages_foreseen=3, **told)
    world.submit(request("r", LONG))
    assert world.state("r") == "waiting"
    world.loaded("d0", pages_foreseen=2, **told)
    assert world.state("r") == "prefilling"


def test_a_worker_that_has_nothing_takes_no_prompt_for_the_pages_of_others() -> None:
    world = ScriptedDeployment(1, 1, limits=LIMITS)
    world.loaded("d0", pages_for_new=LIMITS.pages, free_pages=LIMITS.pages, pages_foreseen=LIMITS.pages - 9)
    world.submit(request("r", LONG))
    assert world.state("r") == "waiting"
    world.loaded("d0", pages_for_new=LIMITS.pages, free_pages=LIMITS.pages, pages_foreseen=LIMITS.pages - 10)
    assert world.state("r") == "prefilling"


def test_a_worker_hears_what_is_begun_for_it_once_it_knows_of_other_routers() -> None:
    world = telling("Foreseen")
    world.submit(request("r", LONG))
    assert told(world) == []
    world.loaded("d0", running=1, pages_for_new=100, pages_foreseen=0)
    assert told(world) == [10]
    world.submit(request("later", LONG))
    world.loaded("d0", running=1, pages_for_new=100, pages_foreseen=0)
    assert told(world) == [10, 20]
    world.prefilled("p0", "r", 10)
    assert (world.placed(Decode, "r"), told(world)) == ("d0", [10, 20, 10])
    world.cancel("later")
    assert told(world) == [10, 20, 10, 0]


def test_a_worker_that_does_not_read_what_is_begun_for_it_is_not_told() -> None:
    world = telling()
    world.loaded("d0", running=1, pages_for_new=100, pages_foreseen=0)
    world.submit(request("r", LONG))
    assert (world.state("r"), told(world)) == ("prefilling", [])


def telling(*understands: str) -> ScriptedDeployment:
    """A deployment whose decode worker has a request of another router, and reads these messages."""
    world = ScriptedDeployment(2, 0, limits=LIMITS, prefill_policy="round_robin")
    world.up("decode", "d0", understands=understands)
    tells(world, "d0", pages_for_new=100)
    return world


def told(world: ScriptedDeployment) -> list[int]:
    return [message.pages for _, message in world.sent(Foreseen)]


def test_a_prompt_waits_while_links_are_busy_with_what_was_begun_before() -> None:
    """At 10 pages a second, 6 may be in front: 0.3 of `ready_seconds`."""
    world = crowded(pages_for_new=100, ready_seconds=2.0)
    busy = {"running": 1, "pages_for_new": 100, "pages_arriving_a_second": 10.0}
    world.loaded("d0", pages_arriving=7, **busy)
    world.submit(request("a", LONG))
    world.submit(request("b", LONG))
    assert [world.state(rid) for rid in "ab"] == ["waiting", "waiting"]
    world.loaded("d0", pages_arriving=6, **busy)
    assert [world.state(rid) for rid in "ab"] == ["prefilling", "waiting"], "a is in front of b"
    world.prefilled("p0", "a", 10)
    world.loaded("d0", pages_arriving=10, **busy)
    assert world.state("b") == "waiting"
    world.joined("d0", "a")
    world.loaded("d0", pages_arriving=0, **busy)
    assert world.state("b") == "prefilling"


def test_what_decode_has_in_its_cache_needs_no_link() -> None:
    world = crowded(pages_for_new=100, ready_seconds=2.0)
    (worker,) = world.core.fleet.of_role("decode")
    for _ in range(40):
        worker.has_fetched(160, 144)
    world.loaded("d0", running=1, pages_for_new=100, pages_arriving_a_second=10.0)
    for rid in "abc":
        world.submit(request(rid, LONG))
    assert [world.state(rid) for rid in "abc"] == ["prefilling"] * 3


def test_each_prompt_is_counted_once_until_the_worker_reports_it() -> None:
    world = crowded(pages_for_new=25)
    for rid in ("a", "b", "c"):
        world.submit(request(rid, LONG))
    assert [world.state(rid) for rid in ("a", "b", "c")] == ["prefilling", "prefilling", "waiting"]
    world.prefilled("p0", "a", 10)
    world.joined("d0", "a")
    assert world.state("c") == "waiting"
    tells(world, "d0", 19)  # with a in it, and b to come
    assert world.state("c") == "waiting"
    tells(world, "d0", 20)
    assert world.state("c") == "prefilling"
    for rid in ("a", "b", "c"):
        world.cancel(rid)
    world.assert_nothing_left()


def test_a_prompt_that_lost_its_place_is_not_counted_in_front_of_itself() -> None:
    world = crowded(pages_for_new=10, no_room_seconds=0.1)
    world.submit(request("r", LONG))
    world.refused("p0", "r", "no_room")
    world.wait(0.2)
    assert len(world.sent(Prefill)) == 2


def test_a_worker_with_room_is_enough_and_one_that_goes_takes_along_what_was_foreseen_there() -> None:
    world = crowded(2, pages_for_new=0)
    tells(world, "d1", 10)
    world.submit(request("a", LONG))
    world.submit(request("b", LONG))
    assert [world.state(rid) for rid in "ab"] == ["prefilling", "waiting"]
    world.down("d1")
    tells(world, "d0", 10)
    assert world.state("b") == "prefilling"


def test_what_an_older_worker_does_not_tell_holds_nothing_back() -> None:
    world = ScriptedDeployment(1, 1)
    world.loaded("d0", free_pages=0)
    world.submit(request("r", LONG))
    assert world.state("r") == "prefilling"


def test_a_worker_that_has_nothing_takes_what_fits_it() -> None:
    world = ScriptedDeployment(1, 1)
    world.loaded("d0", pages_for_new=5)  # the rest is kept for others, but there are none
    world.submit(request("r", LONG))
    assert world.state("r") == "prefilling"


def test_a_stream_that_has_begun_is_computed_again_whatever_is_foreseen() -> None:
    world = decoding()
    world.down("d0")
    tells(world, "d1", 0)
    world.core.fleet.workers["d1"].refused.add("", 0)
    peer, _ = world.sent(Prefill, "r")[-1]
    world.prefilled(peer, "r", 12, attempt=2, index=2)
    assert world.placed(Decode, "r") == "d0", "the worker tells that it has no room"
    world.wait(4.0)
    assert world.placed(Decode, "r") == "d1", "it has waited so long that the worker is asked"


def test_the_only_prompt_of_a_tenant_is_begun_where_those_of_another_router_leave_nothing_but_free_pages() -> (
    None
):
    world = ScriptedDeployment(2, 1, limits=LIMITS, no_room_seconds=0.1)
    tells(world, "d0", 0)
    for rid in ("only", "second"):
        world.submit(request(rid, LONG, tenant="modest"))
    assert [world.state(rid) for rid in ("only", "second")] == ["prefilling", "waiting"]
    world.prefilled(str(world.placed(Prefill, "only")), "only", 10)
    assert world.placed(Decode, "only") == "d0", "nor does its stream wait for more"
    world.refused("d0", "only", "no_room")
    world.wait(1.0)
    assert len(world.sent(Decode, "only")) == 1, "it has much there from the other router"
    world.cancel("only")
    assert world.state("second") == "waiting"


def test_a_prompt_that_grows_beyond_an_even_share_waits_although_its_tenant_has_no_other() -> None:
    world = ScriptedDeployment(2, 1, limits=LIMITS)
    tells(world, "d0", 0)
    even = LIMITS.pages * LIMITS.page_size // 3
    world.submit(request("large", LONG, max_new_tokens=even + 2 - len(LONG), tenant="modest"))
    assert world.state("large") == "waiting"
    tells(world, "d0", 10)
    assert world.state("large") == "prefilling"

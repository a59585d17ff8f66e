"""Streams and prompts on the same decode workers: who gets which while prompts wait."""

from __future__ import annotations

import sys
from types import FrameType

import msgspec

from router.core.queueing import stream_packing
from router.core.queueing.balance import FRESH_SECONDS
from router.core.queueing.stream_packing import LEAVING_STREAMS, PROMPTS_LOOKED_AT
from router.core.requests.live_request import LiveRequest
from router.core.requests.sampling_group import split_choices
from router.placement_policies import Placement
from shared.links.events import Received
from shared.wire.messages import Decode, Draining, Joined, Limits, Load, Migrate, Prefilled, Serve
from tests.unit.router.deployment import LIMITS, ScriptedDeployment, baton, hello, request

WHOLE = msgspec.structs.replace(LIMITS, extend_tokens=64)
LONG = tuple(range(1, 100))
IN_HASTE = {"extend_rate": 10.0, "extend_rate_alone": 100.0}  # little of a step is left for prompts


def deployment(limits: Limits = WHOLE) -> ScriptedDeployment:
    """Three decode workers; the first has three streams, and little time for prompts beside them."""
    world = ScriptedDeployment(0, 0, limits=limits, local_prefill="short")
    for number in range(3):
        world.up("decode", f"d{number}", limits=limits, understands=("Serve",))
    world.loaded("d0", running=3, queued_tokens=40, **IN_HASTE)
    for uid in ("d1", "d2"):
        world.loaded(uid, extend_rate=100.0, extend_rate_alone=100.0)
    return world


def begun(world: ScriptedDeployment, rid: str) -> str:
    """The worker that has computed its prompt."""
    peer = world.placed(Serve, rid)
    assert peer is not None
    world.say(peer, Prefilled(rid, 1, 0, (10,), None))
    return peer


def fetched_once(world: ScriptedDeployment, seconds: float = 0.01) -> None:
    """A stream moved within so many seconds: what a pause is, is known."""
    world.core._stream_packing._seconds.observe_fetch(("weights", "kv"), 100, seconds, world.now)


def with_another_model(**load: object) -> ScriptedDeployment:
    """As above, but d0 has time; and a worker of another model, and of its own KV group, tells this load."""
    world = deployment()
    world.loaded("d0", running=3, queued_tokens=40, extend_rate=100.0, extend_rate_alone=100.0)
    fields = {"model_name": "n", "model": "others", "limits": WHOLE, "understands": ("Serve",)}
    world.up("decode", "other", **fields)
    world.loaded("other", **load)
    return world


def test_a_stream_goes_to_the_worker_with_most_streams_behind_its_first_token() -> None:
    world = deployment()
    world.submit(request("r"))
    here = begun(world, "r")
    assert here in ("d1", "d2")
    assert [peer for peer, _ in world.sent(Migrate, "r")] == [here]
    world.migrating(here, "r", 1)
    assert world.placed(Decode, "r") == "d0"
    world.say("d0", Joined("r", 1, 4096, 0, 0.01))
    world.generated("d0", "r", 1, 11)
    assert len(world.sent(Migrate, "r")) == 1, "it moves once"
    assert (world.output("r"), world.core.counters.migrations["migrated", "packed"]) == ([10, 11], 1)


def test_it_stays_where_the_pool_of_the_other_worker_is_half_full() -> None:
    pool = LIMITS.pages * LIMITS.page_size
    for tokens, moves in ((pool // 2, True), (pool // 2 + 1, False)):
        world = deployment()
        world.loaded("d0", running=3, running_tokens=tokens, queued_tokens=40, **IN_HASTE)
        world.submit(request("r"))
        begun(world, "r")
        assert bool(world.sent(Migrate, "r")) == moves


def test_it_stays_where_the_links_of_the_other_worker_are_busy_for_longer_than_it_may_pause() -> None:
    for pages, moves in ((50, True), (51, False)):
        world = deployment()
        links = {"pages_arriving": pages, "pages_arriving_a_second": 100.0}
        world.loaded("d0", running=3, queued_tokens=40, **links, **IN_HASTE)
        world.submit(request("r"))
        begun(world, "r")
        assert bool(world.sent(Migrate, "r")) == moves


def test_it_stays_while_no_prompt_waits_or_all_have_time_for_prompts() -> None:
    for load in (
        {"queued_tokens": 0, **IN_HASTE},
        {"queued_tokens": 40, "extend_rate": 80.0, "extend_rate_alone": 100.0},
    ):
        world = deployment()
        world.loaded("d0", running=3, **load)
        world.submit(request("r"))
        begun(world, "r")
        assert world.sent(Migrate) == []


def test_streams_make_room_where_they_take_more_than_a_fifth_of_the_time_for_prompts() -> None:
    for rate, moves in ((79.0, True), (80.0, False)):
        world = deployment()
        world.loaded("d0", running=3, queued_tokens=40, extend_rate=rate, extend_rate_alone=100.0)
        world.submit(request("r"))
        begun(world, "r")
        assert bool(world.sent(Migrate, "r")) == moves


def test_workers_of_another_model_that_have_little_time_pack_no_streams() -> None:
    world = with_another_model(running=3, queued_tokens=40, **IN_HASTE)
    world.submit(request("r"))
    begun(world, "r")
    assert world.sent(Migrate) == []


def test_prompts_of_another_model_pack_no_streams() -> None:
    for model, packs in (("n", False), ("m", True)):
        world = with_another_model(slots_free=0, **IN_HASTE)
        world.loaded("d0", running=3, free_pages=100, **IN_HASTE)
        world.submit(request("r"))
        for uid in ("d1", "d2"):
            world.loaded(uid, slots_free=0)
        world.submit(request("large", tuple(range(1, 2001)), model=model))
        assert world.placed(Serve, "large") is None, "it waits at the router"
        here = begun(world, "r")
        assert [peer for peer, _ in world.sent(Migrate, "r")] == [here] * packs


def test_a_worker_that_drains_packs_no_streams() -> None:
    world = deployment()
    world.say("d0", Draining())
    world.loaded("d1", running=3, extend_rate=100.0, extend_rate_alone=100.0)
    world.submit(request("r"))
    assert begun(world, "r") == "d2"
    assert world.sent(Migrate) == [], "d1 has as many streams, and all the time that it wants"


def test_of_each_kv_group_the_worker_with_fewest_streams_is_emptied_unless_it_drains() -> None:
    world = deployment()
    fields = {"model_name": "n", "model": "others", "limits": WHOLE, "understands": ("Serve",)}
    for number in range(2):
        world.up("decode", f"n{number}", **fields)
    for uid, running in (("d0", 1), ("d1", 2), ("d2", 3), ("n0", 5), ("n1", 4)):
        world.loaded(uid, running=running, queued_tokens=40, **IN_HASTE)
    packing = world.core._stream_packing
    for model in ("weights", "others"):
        packing._seconds.observe_fetch((model, "kv"), 100, 0.01, world.now)
    packing.begin_pass()
    assert [worker.peer for worker in packing.to_empty(world.now)] == ["d0", "n1"]
    world.say("d0", Draining())
    assert [worker.peer for worker in packing.to_empty(world.now)] == ["d1", "n1"]


def test_it_stays_where_the_others_have_fewer_streams_or_no_room() -> None:
    world = deployment()
    for uid in ("d1", "d2"):
        world.loaded(uid, running=4, extend_rate=100.0, extend_rate_alone=100.0)
    world.submit(request("r"))
    begun(world, "r")
    assert world.sent(Migrate) == []
    world = deployment()
    world.loaded("d0", running=3, queued_tokens=40, slots_free=0, **IN_HASTE)
    world.loaded("d2", slots_free=0, extend_rate=100.0, extend_rate_alone=100.0)
    world.submit(request("r"))
    assert begun(world, "r") == "d1"
    assert world.sent(Migrate) == []


def test_a_stream_stays_where_its_pages_would_take_long() -> None:
    world = deployment()
    world.submit(request("r"))
    here = begun(world, "r")
    world.migrating(here, "r", 1)
    assert world.placed(Decode, "r") == "d0"
    world.wait(1.0)
    world.say("d0", Joined("r", 1, 4096, 0, 1.0))
    world.submit(request("s"))
    begun(world, "s")
    assert world.sent(Migrate, "s") == [], "a second for four tokens"


def test_a_worker_is_asked_for_the_stream_while_it_computes_the_prompt() -> None:
    world = deployment()
    world.loaded("d1", queued_tokens=20, extend_rate=100.0, extend_rate_alone=100.0)
    world.submit(request("r"))
    here = world.placed(Serve, "r")
    assert here == "d2"
    assert world.sent(Migrate, "r") == [("d2", Migrate("r", 1))]
    assert "r" in world.core.fleet.workers["d0"].reserved
    world.say("d2", Prefilled("r", 1, 0, (10,), baton("r", 1, 3, "d2")))
    assert world.placed(Decode, "r") == "d0"
    assert world.core.fleet.workers["d0"].reserved == {}
    assert len(world.sent(Migrate, "r")) == 1


def test_the_last_streams_leave_a_worker_where_prompts_wait_a_few_at_a_time_and_once() -> None:
    world = deployment(msgspec.structs.replace(WHOLE, slots=16))
    for uid in ("d1", "d2"):
        world.loaded(uid, slots_free=0)
    world.loaded("d0", slots_free=16)
    for number in range(6):
        world.submit(request(f"s{number}"))
        begun(world, f"s{number}")
    assert world.sent(Migrate) == []
    fetched_once(world)
    held = {"running": 6, "queued_tokens": 40, "slots_free": 10, **IN_HASTE}
    world.loaded("d0", **held)
    assert world.sent(Migrate) == [], "nobody has more streams"
    world.loaded("d1", running=9, slots_free=7, extend_rate=100.0, extend_rate_alone=100.0)
    world.loaded("d0", **held)
    asked = [each.rid for _, each in world.sent(Migrate)]
    assert asked == [f"s{number}" for number in range(LEAVING_STREAMS)]
    world.migrating("d0", "s0", 1)
    assert world.placed(Decode, "s0") == "d1"
    world.say("d1", Joined("s0", 1, 4096, 0, 0.01))
    world.loaded("d0", **held)
    assert [each.rid for _, each in world.sent(Migrate)] == [*asked, f"s{LEAVING_STREAMS}"]
    world.loaded("d1", running=2, queued_tokens=40, slots_free=14, **IN_HASTE)
    world.loaded("d0", running=12, slots_free=4)
    assert len(world.sent(Migrate, "s0")) == 1


def test_a_stream_that_has_got_no_token_lately_is_not_asked_to_leave() -> None:
    world = deployment(msgspec.structs.replace(WHOLE, slots=16))
    for uid in ("d1", "d2"):
        world.loaded(uid, slots_free=0)
    world.loaded("d0", slots_free=16)
    for rid in ("old", "new"):
        world.submit(request(rid))
        begun(world, rid)
    fetched_once(world)
    world.wait(FRESH_SECONDS)
    world.generated("d0", "new", 1, 11)
    world.loaded("d1", running=9, slots_free=7, extend_rate=100.0, extend_rate_alone=100.0)
    world.loaded("d0", running=2, queued_tokens=40, slots_free=14, **IN_HASTE)
    assert [each.rid for _, each in world.sent(Migrate)] == ["new"], "the other may be retracted"


def test_no_stream_leaves_later_while_nobody_knows_how_long_it_would_pause() -> None:
    world = deployment()
    for uid in ("d1", "d2"):
        world.loaded(uid, slots_free=0)
    world.submit(request("r"))
    begun(world, "r")
    for seen, asked in ((False, []), (True, ["r"])):
        if seen:
            fetched_once(world)
        world.loaded("d1", slots_free=0)
        world.loaded("d1", running=9, slots_free=2, extend_rate=100.0, extend_rate_alone=100.0)
        world.loaded("d0", running=1, queued_tokens=40, slots_free=3, **IN_HASTE)
        assert [each.rid for _, each in world.sent(Migrate)] == asked


def test_streams_make_no_room_at_a_worker_that_balance_empties() -> None:
    world = deployment()
    world.loaded("d0", running=3, running_tokens=300, queued_tokens=40, free_pages=8, **IN_HASTE)
    world.submit(request("r"))
    begun(world, "r")
    assert world.sent(Migrate) == []


def test_a_worker_that_could_not_read_lately_is_not_chosen() -> None:
    world = deployment()
    world.submit(request("r"))
    here = begun(world, "r")
    world.migrating(here, "r", 1)
    world.refused("d0", "r", "unreachable")
    other = ({"d1", "d2"} - {here}).pop()
    world.loaded(other, slots_free=0)
    world.submit(request("s"))
    assert begun(world, "s") == here
    assert world.sent(Migrate, "s") == []


def test_prompts_that_time_would_not_help_pack_no_streams() -> None:
    world = ScriptedDeployment(0, 0, limits=WHOLE, local_prefill="short", tenant_running_max=1)
    for number in range(3):
        world.up("decode", f"d{number}", limits=WHOLE, understands=("Serve",))
    world.loaded("d0", running=3, extend_rate=10.0, extend_rate_alone=100.0)
    for uid in ("d1", "d2"):
        world.loaded(uid, extend_rate=100.0, extend_rate_alone=100.0)
    world.submit(request("r"))
    world.submit(request("s"))
    assert world.placed(Serve, "s") is None, "its tenant has one running"
    begun(world, "r")
    assert world.sent(Migrate) == []


def test_a_prompt_that_was_begun_in_the_same_pass_may_wait_for_time() -> None:
    world = deployment()
    world.loaded("d0", running=3, free_pages=100, **IN_HASTE)
    for uid in ("d1", "d2"):
        world.loaded(uid, slots_free=0)
    for rid, first in (("r", 1), ("s", 5)):  # prefixes with own workers of their own
        world.submit(request(rid, tuple(range(first, 1700))))
        assert world.placed(Serve, rid) is None
    in_haste = Load(
        free_pages=LIMITS.pages, slots_free=4, running=3, extend_rate=10.0, extend_rate_alone=100.0
    )
    idle = Load(free_pages=LIMITS.pages, slots_free=4, extend_rate=100.0, extend_rate_alone=100.0)
    world.link(Received("d0", in_haste), Received("d1", idle), Received("d2", idle))
    assert {world.placed(Serve, "r"), world.placed(Serve, "s")} == {"d1", "d2"}
    assert [each.rid for _, each in world.sent(Migrate)] == ["r", "s"]


def test_a_stream_whose_new_worker_has_gone_meanwhile_goes_on_elsewhere() -> None:
    world = deployment()
    world.submit(request("r"))
    here = begun(world, "r")
    world.down("d0")
    world.migrating(here, "r", 1)
    assert world.placed(Decode, "r") in {"d1", "d2"} - {here}


def test_a_stream_that_no_other_worker_can_take_goes_back_to_the_one_that_has_its_pages() -> None:
    world = deployment()
    world.submit(request("r"))
    here = begun(world, "r")
    for uid in {"d0", "d1", "d2"} - {here}:
        world.down(uid)
    world.migrating(here, "r", 1)
    assert world.placed(Decode, "r") == here


def test_a_stream_whose_own_pages_take_the_room_it_waits_for_is_computed_anew() -> None:
    for running in (1, 0):
        world = deployment()
        world.submit(request("r"))
        here = begun(world, "r")
        for uid in {"d0", "d1", "d2"} - {here}:
            world.down(uid)
        world.loaded(here, free_pages=0, running=running)
        world.migrating(here, "r", 1)
        assert (world.state("r") == "ready") == bool(running), "it waits for what runs there"
        assert world.core.counters.continuations["holder_full"] == 1 - running


def test_a_stream_that_makes_room_does_not_keep_the_last_workers_from_their_ends() -> None:
    world = deployment()
    world.submit(request("r"))
    here = begun(world, "r")
    for uid in {"d1", "d2"} - {here}:
        world.down(uid)
    world.loaded("d0", slots_free=0, running=1)
    world.loaded(here, slots_free=0, running=1)
    world.migrating(here, "r", 1)
    assert world.state("r") == "ready"
    world.say("d0", Draining())
    world.say(here, Draining())
    assert world.core.counters.continuations["holder_drains"] == 1


def test_a_prompt_waits_for_a_turn_at_a_worker_that_has_it_far_sooner() -> None:
    world = deployment()
    for uid in ("d1", "d2"):
        world.loaded(uid, queued_tokens=260, extend_rate=100.0, extend_rate_alone=100.0)
    world.loaded("d0", running=3, **IN_HASTE)
    world.submit(request("r", LONG))
    assert world.sent(Serve) == [], "ten seconds there, and four elsewhere with its turn soon"
    world.loaded("d1", queued_tokens=60, extend_rate=100.0, extend_rate_alone=100.0)
    assert world.placed(Serve, "r") == "d1"


def test_a_stream_that_its_new_worker_cannot_read_goes_on_where_its_pages_are() -> None:
    world = deployment()
    world.submit(request("r"))
    here = begun(world, "r")
    for uid in {"d1", "d2"} - {here}:
        world.down(uid)
    world.migrating(here, "r", 1)
    assert world.placed(Decode, "r") == "d0"
    world.refused("d0", "r", "unreachable")
    assert world.placed(Decode, "r") == here, "nothing is computed again"
    assert len(world.sent(Serve, "r")) == 1
    world.joined(here, "r")
    fetched_once(world)
    world.wait(world.core.settings.unreachable_seconds)
    world.generated(here, "r", 1, 11)
    world.loaded(here, running=1, queued_tokens=40, slots_free=3, **IN_HASTE)
    assert len(world.sent(Migrate, "r")) == 2, "it has not moved yet"


def test_the_choices_of_one_request_stay_with_the_pages_of_their_prompt() -> None:
    world = deployment(msgspec.structs.replace(WHOLE, slots=16))
    for uid in ("d0", "d1", "d2"):
        world.loaded(uid, running=3 * (uid == "d0"), queued_tokens=40, slots_free=12, **IN_HASTE)
    for choice in split_choices(request("g", LONG[:32]), ["g0", "g1"]):
        world.submit(choice)
    [(here, _)] = world.sent(Serve)
    world.say(here, Prefilled("g0", 1, 0, (10,), None))
    assert world.sent(Migrate) == []


WORKERS, STREAMS = 64, 256


def calls_of_a_pass(places: int) -> tuple[int, int]:
    """Calls within packing in one pass over 256 ready streams, and those placed, on 64 workers with little time.

    At the router prompts wait, none of them for the time of workers: their tenant has as many running as it may.
    """
    limits = msgspec.structs.replace(WHOLE, slots=STREAMS)
    core = ScriptedDeployment(1, 0, limits=limits, local_prefill="short", tenant_running_max=1).core
    for number in range(WORKERS):
        worker = core.fleet.up(
            f"d{number}", hello("decode", f"d{number}", limits=limits, understands=("Serve",))
        )
        assert not isinstance(worker, str)
        worker.report(
            Load(free_pages=512, slots_free=places, running=1, extend_rate=10.0, extend_rate_alone=100.0)
        )
    holder = core.fleet.workers["p0"]
    for number in range(STREAMS):
        live = core._requests.admit(request(f"r{number}"), 0.0)
        core._requests.prefill(live, Placement(holder, "", "least"), 0.0)
        core._requests.deliver(live, (10,), (), 0.0)
        core._requests.hold(live, baton(live.rid, 1, 3), 0.0)
    for number in range(PROMPTS_LOOKED_AT):
        core._requests.admit(request(f"w{number}"), 0.0)
    calls = 0

    def count(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        of_packing = frame.f_code.co_filename == stream_packing.__file__
        calls += event == "call" and (of_packing or frame.f_code is LiveRequest.may_begin.__code__)

    core._placeable = True
    sys.setprofile(count)
    try:
        core._place_pending(0.0)
    finally:
        sys.setprofile(None)
    return calls, core.requests_by_state["decoding"]


def test_whether_streams_are_packed_is_found_out_once_a_pass() -> None:
    for places, placed in ((4, STREAMS), (0, 0)):
        calls, decoding = calls_of_a_pass(places)
        assert decoding == placed
        assert calls < STREAMS + 10 * WORKERS

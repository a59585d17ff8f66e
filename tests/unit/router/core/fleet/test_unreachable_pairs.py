"""A decode worker that cannot reach the worker with the pages: another one fetches, or another one computes."""

from __future__ import annotations

from router.core.effects import RequestFailed
from router.core.requests.sampling_group import split_choices
from shared.wire.messages import Cancel, Decode, Draining, Migrate, Prefill, Serve
from tests.unit.router.core.queueing.test_local_prompts import LONG, deployment
from tests.unit.router.deployment import LIMITS, ScriptedDeployment, request


def ready(prefill: int, decode: int, losses_max: int = 1, **settings: float) -> ScriptedDeployment:
    """A request whose pages lie on p0, and which d0 is asked to fetch."""
    world = ScriptedDeployment(prefill, decode, limits=LIMITS, losses_max=losses_max, **settings)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    assert world.placed(Decode, "r") == "d0"
    return world


def test_another_decode_worker_fetches_the_same_pages_and_nothing_is_lost() -> None:
    world = ready(1, 2)
    world.refused("d0", "r", "unreachable")
    assert world.placed(Decode, "r") == "d1"
    assert [decode.attempt for _, decode in world.sent(Decode)] == [1, 1]
    assert not world.sent(Cancel)
    world.joined("d1", "r")
    world.finished("d1", "r", 1)
    assert not isinstance(world.outcome("r"), RequestFailed)
    world.assert_nothing_left()


def test_without_another_decode_worker_another_prefill_worker_computes_it() -> None:
    world = ready(2, 1)
    world.refused("d0", "r", "unreachable")
    assert world.sent(Cancel) == [("p0", Cancel("r", 1))]
    assert world.placed(Prefill, "r") == "p1"
    world.prefilled("p1", "r", 11, attempt=2, index=1)
    assert world.placed(Decode, "r") == "d0"
    assert +world.core.counters.continuations == {"unreachable": 1}


def test_the_same_pages_are_fetched_by_two_workers_at_most() -> None:
    world = ready(2, 4)
    world.refused("d0", "r", "unreachable")
    world.refused("d1", "r", "unreachable")
    assert world.placed(Prefill, "r") == "p1"


def test_a_request_that_nobody_can_fetch_ends() -> None:
    world = ready(1, 1, losses_max=2, loss_seconds=0.1)
    for attempt in (1, 2, 3):
        if world.outcome("r") is None:
            world.refused("d0", "r", "unreachable", attempt=attempt)
            world.wait(1.0)
            world.prefilled("p0", "r", 10 + attempt, attempt=attempt + 1, index=attempt)
            world.wait(1.0)
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert outcome.code == "attempts_exhausted"
    world.assert_nothing_left()


def test_a_request_whose_last_worker_that_could_fetch_leaves_is_computed_anew() -> None:
    world = ready(1, 2)
    world.loaded("d1", slots_free=0)
    world.refused("d0", "r", "unreachable")
    assert world.state("r") == "ready"
    world.down("d1")
    assert world.placed(Prefill, "r") == "p0"
    assert [prefill.attempt for _, prefill in world.sent(Prefill)] == [1, 2]


def test_a_request_is_computed_elsewhere_while_the_only_worker_with_room_could_not_fetch_it() -> None:
    world = ready(2, 2)
    world.loaded("d1", slots_free=0)
    world.refused("d0", "r", "unreachable")
    assert world.placed(Prefill, "r") == "p1"


def test_a_request_that_was_computed_elsewhere_once_waits_for_another_reader() -> None:
    world = ready(2, 2, losses_max=1)
    world.loaded("d1", slots_free=0)
    world.refused("d0", "r", "unreachable")
    world.prefilled("p1", "r", 11, attempt=2, index=1)
    world.refused("d0", "r", "unreachable", attempt=2)
    assert world.state("r") == "ready", "one more attempt would be a loss"
    world.loaded("d1", slots_free=1)
    assert [(uid, decode.attempt) for uid, decode in world.sent(Decode)][-1] == ("d1", 2)


def test_a_request_that_waits_for_another_reader_holds_up_nobody() -> None:
    world = ready(1, 2)
    world.loaded("d1", slots_free=0)
    world.refused("d0", "r", "unreachable")
    for rid in ("a", "b", "c"):
        world.submit(request(rid))
        world.prefilled("p0", rid, 10)
        assert world.placed(Decode, rid) == "d0", "it is asked although it failed once: no other has room"
    assert world.state("r") == "ready"
    world.loaded("d1", slots_free=1)
    assert world.placed(Decode, "r") == "d1"


def test_a_draining_worker_is_no_other_way() -> None:
    world = ready(2, 2)
    world.say("d1", Draining())
    world.refused("d0", "r", "unreachable")
    assert world.placed(Prefill, "r") == "p1", "d1 takes nothing new"
    for rid in ("a", "b"):
        world.submit(request(rid))
        assert world.placed(Prefill, rid) == "p1", "d0 is all there is, and could not read from p0"
    world.say("p1", Draining())
    world.submit(request("c"))
    assert world.placed(Prefill, "c") == "p0", "p1 takes nothing new either"


def test_a_worker_that_was_cut_off_is_used_again_when_its_time_is_over() -> None:
    world = ready(2, 1, unreachable_seconds=5.0)
    world.refused("d0", "r", "unreachable")
    world.loaded("p1", accepting=False)
    world.submit(request("waits"))
    assert world.state("waits") == "waiting"
    world.wait(5.1)
    assert world.placed(Prefill, "waits") == "p0", "nothing else has happened"


def test_a_stream_may_migrate_to_a_worker_that_could_not_read_its_first_pages() -> None:
    world = ready(1, 2)
    world.refused("d0", "r", "unreachable")
    world.joined("d1", "r")
    world.wait(100.0)
    world.say("d1", Draining())
    assert [uid for uid, _ in world.sent(Migrate)] == ["d1"]


def test_other_requests_avoid_the_pair_for_a_while() -> None:
    world = ready(1, 2, unreachable_seconds=30.0)
    world.refused("d0", "r", "unreachable")
    for rid in ("a", "b", "c"):
        world.submit(request(rid))
        world.prefilled("p0", rid, 10)
        assert world.placed(Decode, rid) == "d1"
    world.wait(31.0)
    world.submit(request("later"))
    world.prefilled("p0", "later", 10)
    assert world.placed(Decode, "later") == "d0"


def test_a_pair_that_could_fetch_again_is_used_again() -> None:
    world = ready(1, 2)
    world.loaded("d1", slots_free=0)
    world.refused("d0", "r", "unreachable")
    world.loaded("d1", slots_free=1)
    assert world.placed(Decode, "r") == "d1"
    world.submit(request("forced"))
    world.down("d1")
    world.prefilled("p0", "forced", 10)
    assert world.placed(Decode, "forced") == "d0"
    world.joined("d0", "forced")
    world.up("decode", "d2")
    world.submit(request("later"))
    world.loaded("d2", slots_free=0)
    world.prefilled("p0", "later", 10)
    assert world.placed(Decode, "later") == "d0"


def test_one_placed_behind_it_lets_it_in_where_it_makes_its_tenant_the_only_one_without() -> None:
    world = ready(1, 2)
    world.loaded("d0", slots_free=0)
    full = {"running": 1, "free_pages": 9, "pages_for_new": 0}
    world.loaded("d1", **full, slots_free=0)
    world.core.fleet.workers["d1"].refused.add("", 0)  # the tenant has much there from another router
    world.refused("d0", "r", "unreachable")
    world.submit(request("behind", tenant="other"))
    world.prefilled("p0", "behind", 10)
    assert len(world.sent(Decode)) == 1
    world.loaded("d1", **full)
    assert [message.rid for _, message in world.sent(Decode)] == ["r", "behind", "r"]


def test_a_worker_that_two_could_not_read_from_computes_nothing_while_another_can() -> None:
    world = ready(2, 3)
    world.refused("d0", "r", "unreachable")
    world.refused("d1", "r", "unreachable")
    for rid in ("a", "b", "c"):
        world.submit(request(rid))
        assert world.placed(Prefill, rid) == "p1"


def test_a_sibling_does_not_wait_for_the_worker_with_its_prompt_whose_pages_nobody_can_read() -> None:
    world = deployment(prefill=1, local_prefill="short")
    first, second = split_choices(request("g", LONG[:32]), ["g0", "g1"])
    world.submit(first)
    world.prefilled("p0", "g0", 10)
    assert world.placed(Decode, "g0") == "d0"
    world.refused("d0", "g0", "unreachable")
    world.loaded("p0", extend_rate=1000.0, queued=3, queued_tokens=5000)
    world.loaded("d0", extend_rate=500.0)
    world.submit(second)
    assert world.placed(Serve, "g1") == "d0"

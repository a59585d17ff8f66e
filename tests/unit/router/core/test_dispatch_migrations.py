"""What the router core does when workers drain: nothing new goes there, and what runs there migrates by its pages."""

from __future__ import annotations

from collections import Counter

import msgspec

from router.core.counters import RouterCounters
from router.core.effects import RequestFailed
from shared.wire.messages import Cancel, Decode, DrainAck, Draining, Migrate, Prefill, Release, Renew
from tests.unit.router.deployment import LIMITS, ScriptedDeployment, decoding, request


def test_a_stream_migrates_to_a_worker_with_room_and_continues_with_the_same_tokens() -> None:
    world = decoding()
    world.say("d0", Draining())
    assert world.sent(Migrate, "r") == [("d0", Migrate("r", 1))]
    assert world.sent(DrainAck) == [("d0", DrainAck())]
    world.generated("d0", "r", 2, 12)
    world.migrating("d0", "r", 3)
    peer, decode = world.sent(Decode, "r")[-1]
    assert (peer, decode.attempt, decode.token_ids) == ("d1", 1, (1, 2, 3, 10, 11, 12))
    assert decode.baton.kv_len == len(decode.token_ids) - 1
    world.wait(1.5)
    assert world.sent(Renew, "r")[-1][0] == "d0"
    world.joined("d1", "r")
    assert world.sent(Release, "r")[-1][0] == "d0"
    world.generated("d1", "r", 3, 13)
    assert world.output("r") == [10, 11, 12, 13]
    assert world.core.counters.migrations == Counter({("migrated", "drain"): 1})
    assert world.core.counters.continuations == Counter()
    assert len(world.sent(Prefill)) == 1
    world.finished("d1", "r", 4)
    world.assert_nothing_left()


def test_nothing_new_goes_to_a_draining_worker() -> None:
    world = ScriptedDeployment(2, 2)
    world.say("p0", Draining())
    world.say("d0", Draining())
    for number in range(4):
        world.submit(request(f"r{number}"))
        assert world.placed(Prefill, f"r{number}") == "p1"
        world.prefilled("p1", f"r{number}", 10)
        assert world.placed(Decode, f"r{number}") == "d1"


def test_without_room_elsewhere_a_stream_goes_on_where_it_is_until_there_is_some() -> None:
    world = decoding()
    world.loaded("d1", slots_free=0)
    world.say("d0", Draining())
    assert not world.sent(Migrate)
    world.generated("d0", "r", 2, 12)
    world.loaded("d1")
    assert world.sent(Migrate, "r") == [("d0", Migrate("r", 1))]


def test_room_is_kept_for_each_that_was_asked_to_migrate() -> None:
    world = ScriptedDeployment(1, 2)
    for number in range(4):
        rid = f"r{number}"
        world.submit(request(rid))
        world.prefilled("p0", rid, 10)
    at = {
        uid: [rid for rid in world.core._requests.live if world.placed(Decode, rid) == uid]
        for uid in ("d0", "d1")
    }
    for uid, rids in at.items():
        for rid in rids:
            world.joined(uid, rid)
    world.loaded("d1", slots_free=1)
    world.say("d0", Draining())
    assert len(world.sent(Migrate)) == 1
    world.loaded("d1", slots_free=1)  # the one that migrates is not there yet
    assert len(world.sent(Migrate)) == 1
    world.cancel(world.sent(Migrate)[0][1].rid)
    assert len(world.sent(Migrate)) == 2


def test_at_saturation_the_room_that_comes_goes_to_streams_of_a_draining_worker_before_new_requests() -> None:
    world = decoding()
    for uid in ("d0", "d1"):
        world.loaded(uid, slots_free=0)
    world.submit(request("ready"))
    world.prefilled("p1", "ready", 20)
    world.say("d0", Draining())
    world.loaded("d1", slots_free=1)
    assert world.sent(Migrate, "r") == [("d0", Migrate("r", 1))]
    assert world.placed(Decode, "ready") is None
    world.loaded("d1", slots_free=2)
    assert world.placed(Decode, "ready") == "d1"


def test_a_stream_that_has_left_its_worker_is_placed_before_requests_that_nobody_reads_yet() -> None:
    world = decoding()
    for uid in ("d0", "d1"):
        world.loaded(uid, slots_free=0)
    world.submit(request("urgent", priority=1))
    world.prefilled("p1", "urgent", 20)
    world.say("d0", Draining())
    world.loaded("d1", slots_free=1)
    world.migrating("d0", "r", 2)
    assert world.placed(Decode, "r") == "d1"
    assert world.placed(Decode, "urgent") is None


def test_room_that_one_migration_has_kept_is_not_promised_to_the_next() -> None:
    world = ScriptedDeployment(1, 1)
    for rid in ("first", "second"):
        world.submit(request(rid))
        world.prefilled("p0", rid, 10)
        world.joined("d0", rid)
    world.up("decode", "d1", limits=msgspec.structs.replace(LIMITS, slots=1))
    world.say("d0", Draining())
    world.migrating("d0", "first", 1)
    assert world.placed(Decode, "first") == "d1"
    assert not world.sent(Migrate, "second")


def test_a_request_that_has_not_joined_migrates_when_it_has() -> None:
    world = ScriptedDeployment(1, 2)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.say("d0", Draining())
    assert not world.sent(Migrate)
    world.joined("d0", "r")
    assert world.sent(Migrate, "r") == [("d0", Migrate("r", 1))]


def test_when_its_new_worker_is_lost_before_it_has_migrated_it_goes_to_another() -> None:
    world = decoding()
    world.up("decode", "d2")
    world.say("d0", Draining())
    target = next(uid for uid, worker in world.core.fleet.workers.items() if worker.reserved)
    world.down(target)
    world.migrating("d0", "r", 2)
    assert world.placed(Decode, "r") in {"d1", "d2"} - {target}


def test_when_its_new_worker_is_lost_while_it_fetches_a_third_one_fetches_the_same_pages() -> None:
    world = decoding()
    world.up("decode", "d2")
    world.say("d0", Draining())
    world.migrating("d0", "r", 2)
    second, decode = world.sent(Decode, "r")[-1]
    world.down(second)
    third, again = world.sent(Decode, "r")[-1]
    assert {second, third} == {"d1", "d2"}
    assert (again.attempt, again.baton, again.token_ids) == (1, decode.baton, decode.token_ids)
    assert not world.sent(Prefill, "r")[1:]
    world.joined(third, "r")
    assert world.core.counters.migrations == Counter({("migrated", "drain"): 1})
    assert world.core.counters.continuations == Counter()


def test_a_request_that_loses_one_new_worker_after_another_is_given_up() -> None:
    world = decoding(losses_max=2)
    for uid in ("d2", "d3"):
        world.up("decode", uid)
    world.say("d0", Draining())
    world.migrating("d0", "r", 2)
    world.down(world.sent(Decode, "r")[-1][0])
    assert world.outcome("r") is None
    world.wait(1)
    world.down(world.sent(Decode, "r")[-1][0])
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert outcome.code == "attempts_exhausted"


def test_one_that_fits_nowhere_stands_in_no_others_way() -> None:
    world = ScriptedDeployment(1, 1)
    for rid, tokens in (("large", 2000), ("small", 8), ("smaller", 8)):
        world.submit(request(rid, max_new_tokens=tokens))
        world.prefilled("p0", rid, 10)
        world.joined("d0", rid)
    world.up("decode", "d1", limits=msgspec.structs.replace(LIMITS, pages=64))
    world.say("d0", Draining())
    assert [migrate.rid for _, migrate in world.sent(Migrate)] == ["small", "smaller"]


def test_a_migrating_stream_whose_pages_cannot_be_fetched_is_recomputed() -> None:
    world = decoding()
    world.say("d0", Draining())
    world.migrating("d0", "r", 2)
    world.refused("d1", "r", "unreachable")
    assert world.state("r") == "prefilling"  # d1 was the only other one
    peer, again = world.sent(Prefill, "r")[-1]
    assert (again.attempt, again.token_ids) == (2, (1, 2, 3, 10, 11))
    assert world.sent(Cancel, "r")[-1][0] == "d0"
    assert world.core.counters.migrations == Counter({("recomputed", "drain"): 1})
    world.prefilled(peer, "r", 12, attempt=2, index=2)
    assert world.placed(Decode, "r") == "d1"


def test_a_migrating_stream_that_finds_no_room_waits_with_its_pages_until_their_worker_ends() -> None:
    world = decoding()
    world.say("d0", Draining())
    world.loaded("d1", slots_free=0)
    world.migrating("d0", "r", 2)
    world.wait(1000)
    assert world.state("r") == "ready"
    world.down("d0")
    assert world.sent(Prefill, "r")[-1][1].attempt == 2


def test_a_migration_that_left_tokens_out_is_recomputed() -> None:
    world = decoding()
    world.say("d0", Draining())
    world.migrating("d0", "r", 3)  # one more than the router has heard
    assert world.sent(Prefill, "r")[-1][1].token_ids == (1, 2, 3, 10, 11)
    assert world.sent(Cancel, "r")[-1][0] == "d0"
    assert world.core.counters.continuations == Counter(gap=1)


def test_a_worker_that_ends_before_its_pages_were_fetched_costs_a_recomputation() -> None:
    world = decoding()
    world.say("d0", Draining())
    world.migrating("d0", "r", 2)
    world.refused("d1", "r", "no_room")
    world.down("d0")
    assert world.sent(Prefill, "r")[-1][1].token_ids == (1, 2, 3, 10, 11)
    world.down("d1")
    world.cancel("r")
    world.assert_nothing_left()


def test_no_prompt_is_computed_for_a_draining_decode_worker() -> None:
    """Its pages would wait for a worker of their format until the request fails."""
    world = ScriptedDeployment(1, 1)
    world.say("d0", Draining())
    world.submit(request("r"))
    assert world.state("r") == "waiting"
    world.up("prefill", "p1", kv_format="new")
    world.up("decode", "d1", kv_format="new")
    assert world.placed(Prefill, "r") == "p1"


def test_each_cause_of_a_migration_is_shown_before_the_first_one() -> None:
    migrations = RouterCounters().migrations
    assert set(migrations) == {
        (outcome, cause) for outcome in ("migrated", "recomputed") for cause in ("drain", "balance", "packed")
    }
    assert not migrations.total()

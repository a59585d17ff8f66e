"""Prompts that decode workers compute: when a router sends them there, and what it makes of the answers."""

from __future__ import annotations

import msgspec
import pytest

from router.core.effects import RequestCompleted, RequestFailed
from router.core.fleet.prefix_index import block_names
from router.core.fleet.prompt_seconds import PromptSeconds
from router.core.fleet.worker import Worker
from router.core.requests.sampling_group import split_choices
from shared.batch.effects import Send
from shared.wire.messages import (
    Cancel,
    Decode,
    Draining,
    Joined,
    Migrate,
    Prefill,
    Prefilled,
    Release,
    Serve,
)
from tests.unit.router.deployment import LIMITS, ScriptedDeployment, baton, request

WHOLE = msgspec.structs.replace(LIMITS, extend_tokens=64)
LONG = tuple(range(1, 161))  # ten pages, and more than two steps compute


def deployment(prefill: int = 0, decode: int = 1, **settings: object) -> ScriptedDeployment:
    """Decode workers that compute prompts."""
    world = ScriptedDeployment(prefill, 0, limits=WHOLE, **settings)
    for number in range(decode):
        world.up("decode", f"d{number}", limits=WHOLE, understands=("Serve",))
    return world


def begun(world: ScriptedDeployment, rid: str, token: int = 10, peer: str = "d0", **fields: object) -> None:
    world.say(peer, Prefilled(rid, 1, 0, (token,), None, **fields))  # type: ignore[arg-type]


def test_without_prefill_workers_a_decode_worker_serves_a_request_from_first_to_last() -> None:
    world = deployment()
    world.submit(request("r", max_new_tokens=3))
    [(peer, served)] = world.sent(Serve)
    assert (peer, served.token_ids, served.prompt_len, served.attempt) == ("d0", (1, 2, 3), 3, 1)
    assert world.state("r") == "extending"
    begun(world, "r", cached_tokens=2)
    assert world.state("r") == "decoding"
    world.generated("d0", "r", 1, 11, 12)
    world.finished("d0", "r", 3)
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestCompleted)
    assert (outcome.usage.cached_tokens, world.output("r")) == (2, [10, 11, 12])
    assert {type(effect.message) for effect in world.effects if isinstance(effect, Send)} == {Serve}
    assert +world.core.counters.local_prompts == {"no_prefill": 1}
    world.assert_nothing_left()


def test_it_may_end_with_its_first_token() -> None:
    world = deployment()
    world.submit(request("r", max_new_tokens=1))
    begun(world, "r", finish="length")
    assert isinstance(world.outcome("r"), RequestCompleted)
    world.assert_nothing_left()


def test_a_prompt_that_opens_a_worker_to_other_tenants_lets_in_those_in_front_of_it_first() -> None:
    world = deployment(prefill=1, local_prefill="short")
    world.loaded("p0", extend_rate=1.0)
    world.loaded("d0", running=1, free_pages=0, pages_for_new=0, extend_rate=1_000.0)
    world.submit(request("kept out", (1,) * 40, max_new_tokens=3_000))
    world.submit(request("first", tenant="other"))
    world.submit(request("behind", (1,) * 40, max_new_tokens=3_000, tenant="third"))
    assert not world.sent(Serve)
    # beside another router's stream, which grows into all but a page, there is room for a short one and for one more
    world.loaded("d0", running=1, free_pages=4, pages_for_new=1, extend_rate=1_000.0)
    assert world.placed(Serve, "first") == "d0"
    assert [world.state(rid) for rid in ("kept out", "behind")] == ["prefilling", "waiting"]


@pytest.mark.parametrize(
    ("way", "prefill", "kind"),
    [
        ("never", 1, Prefill),
        ("fallback", 1, Prefill),
        ("always", 1, Serve),
        ("fallback", 0, Serve),
        ("always", 0, Serve),
    ],
)
def test_who_computes_a_prompt(way: str, prefill: int, kind: type[Prefill] | type[Serve]) -> None:
    world = deployment(prefill, local_prefill=way)
    world.submit(request("r"))
    assert len(world.sent(kind)) == 1


def test_never_waits_for_a_prefill_worker_and_says_so() -> None:
    world = deployment(local_prefill="never", waiting_seconds_max=5.0)
    world.submit(request("r"))
    assert world.core.fleet.missing == ["prefill"]
    world.wait(6)
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert (outcome.status, "prefill" in outcome.message, world.sent(Serve)) == (503, True, [])


def test_a_worker_that_does_not_know_the_command_gets_none() -> None:
    world = ScriptedDeployment(0, 0)
    world.up("decode", "old", limits=WHOLE)
    world.up("decode", "without", understands=("Serve",))
    world.submit(request("r"))
    assert world.sent(Serve) == []
    assert world.core.fleet.missing == ["prefill"]


def test_prefill_workers_that_go_and_come_back_change_the_way() -> None:
    world = deployment(prefill=1)
    world.submit(request("a"))
    world.down("p0")
    assert world.placed(Serve, "a") == "d0"  # the second attempt
    assert world.core.fleet.missing == []
    begun_again = world.sent(Serve, "a")[0][1]
    assert begun_again.attempt == 2
    world.up("prefill", "p1", limits=WHOLE)
    world.submit(request("b"))
    assert world.placed(Prefill, "b") == "p1"


def test_a_draining_prefill_worker_computes_nothing_new() -> None:
    world = deployment(prefill=1)
    world.core.fleet.drain(world.core.fleet.workers["p0"])
    world.submit(request("r"))
    assert world.placed(Serve, "r") == "d0"


def test_what_has_no_turn_soon_waits_at_the_router_for_the_next_report() -> None:
    world = deployment()
    for number in range(3):
        world.submit(request(f"r{number}", LONG))
    assert [world.state(f"r{number}") for number in range(3)] == ["extending", "waiting", "waiting"]
    world.loaded("d0", running=1, queued_tokens=500)  # another router's, too
    begun(world, "r0")
    assert world.state("r1") == "waiting"
    world.loaded("d0", running=1, queued_tokens=0)
    assert world.state("r1") == "extending"


def test_prompts_that_fit_a_step_together_have_a_turn_beside_a_long_one() -> None:
    world = deployment()
    world.submit(request("long", LONG))
    for number in range(3):
        world.submit(request(f"s{number}", tuple(range(1, 31)), max_new_tokens=2))
    world.submit(request("other", LONG))
    assert [world.state(f"s{number}") for number in range(3)] == ["extending", "extending", "waiting"]
    begun(world, "s0")
    assert [world.state(rid) for rid in ("s2", "other")] == ["extending", "waiting"]
    world.loaded("d0", running=1, queued_tokens=300)
    begun(world, "long")
    world.submit(request("s3", (1, 2, 3)))
    assert world.state("s3") == "waiting", "another router's are no reason"


def test_a_tenant_without_a_prompt_there_has_a_turn_beside_one_that_fills_it() -> None:
    world = deployment()
    for number in range(2):
        world.submit(request(f"a{number}", LONG, tenant="a"))
    world.submit(request("b", tenant="b"))
    assert [world.state(rid) for rid in ("a0", "a1", "b")] == ["extending", "waiting", "extending"]


def test_the_second_turn_of_a_chat_goes_where_the_first_was_computed() -> None:
    world = deployment(decode=2)
    first = tuple(range(1, 321))
    world.submit(request("a", first, max_new_tokens=2))
    peer = world.placed(Serve, "a")
    assert peer is not None
    begun(world, "a", peer=peer, token=400)
    world.generated(peer, "a", 1, 401)
    world.finished(peer, "a", 2)
    world.submit(request("b", (*first, 400, 401, 402)))
    assert world.placed(Serve, "b") == peer


def test_what_was_put_back_has_as_long_to_wait_as_before() -> None:
    world = deployment(waiting_seconds_max=5.0)
    world.submit(request("r"))
    world.wait(6)
    world.refused("d0", "r", "no_room")
    assert world.outcome("r") is None
    world.wait(1)
    assert len(world.sent(Serve, "r")) == 2
    begun(world, "r", cached_tokens=3)
    world.generated("d0", "r", 1, *range(7))
    world.finished("d0", "r", 8)
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestCompleted)
    assert outcome.usage.cached_tokens == 0  # what it had computed itself


def test_a_small_prefill_worker_bounds_nothing_that_decode_workers_serve_whole() -> None:
    world = deployment()
    world.up("prefill", "small", limits=msgspec.structs.replace(LIMITS, context_len=100))
    world.submit(request("long", LONG))
    assert world.placed(Serve, "long") == "d0"
    world.submit(request("short"))
    assert world.placed(Prefill, "short") == "small"


@pytest.mark.parametrize("way", ["short", "always"])
def test_a_prompt_that_fits_no_context_at_decode_is_refused_in_a_sentence_whoever_could_compute_it(
    way: str,
) -> None:
    world = ScriptedDeployment(1, 0, limits=WHOLE, local_prefill=way)
    small = msgspec.structs.replace(WHOLE, context_len=100)
    world.up("decode", "small", limits=small, understands=("Serve",))
    world.submit(request("long", LONG))
    outcome = world.outcome("long")
    assert isinstance(outcome, RequestFailed)
    assert (outcome.status, world.sent(Serve), world.sent(Prefill)) == (400, [], [])
    assert "100" in outcome.message
    world.submit(request("short"))
    assert world.state("short") in ("extending", "prefilling")


def test_a_prompt_that_a_prefill_worker_has_lost_goes_to_decode_where_there_is_no_other() -> None:
    world = deployment(prefill=1)
    world.submit(request("r"))
    world.refused("p0", "r", "internal")
    world.wait(2)
    assert world.placed(Serve, "r") == "d0"


def test_no_room_puts_it_back_into_the_queue_without_a_loss() -> None:
    world = deployment()
    world.submit(request("r"))
    world.refused("d0", "r", "no_room")
    assert world.state("r") == "waiting"
    world.wait(1)
    assert [served.attempt for _, served in world.sent(Serve, "r")] == [1, 1]
    begun(world, "r")
    assert world.output("r") == [10]


def test_a_lost_worker_is_a_continuation_from_all_tokens_so_far() -> None:
    world = deployment(decode=2)
    world.submit(request("r"))
    peer = world.placed(Serve, "r")
    assert peer is not None
    begun(world, "r", peer=peer)
    world.generated(peer, "r", 1, 11)
    world.down(peer)
    other = "d1" if peer == "d0" else "d0"
    [_, (again, served)] = world.sent(Serve, "r")
    assert (again, served.token_ids, served.prompt_len, served.attempt) == (other, (1, 2, 3, 10, 11), 3, 2)


def test_a_stop_string_that_is_found_late_ends_it_while_it_is_computed_again() -> None:
    world = deployment(decode=2)
    world.submit(request("r"))
    peer = world.placed(Serve, "r")
    assert peer is not None
    begun(world, "r", peer=peer)
    world.down(peer)
    assert world.state("r") == "extending"
    world.stop("r")
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestCompleted)
    assert outcome.reason == "stop"
    assert len(world.sent(Cancel, "r")) == 1
    world.assert_nothing_left()


def test_a_stream_that_was_served_whole_migrates_by_its_pages() -> None:
    world = deployment(decode=2)
    world.submit(request("r"))
    peer = world.placed(Serve, "r")
    assert peer is not None
    worker = world.core.fleet.workers[peer]
    world.say(peer, Draining())
    assert [each.rid for _, each in world.sent(Migrate)] == ["r"]
    begun(world, "r", peer=peer)
    assert worker.draining
    assert len(world.sent(Migrate)) == 1, "it was asked while it computed the prompt"
    world.migrating(peer, "r", 1)
    assert world.placed(Decode, "r") not in (None, peer)


def test_a_stream_leaves_with_its_first_token_where_its_worker_was_asked_before() -> None:
    world = deployment(decode=2)
    world.submit(request("r"))
    peer = world.placed(Serve, "r")
    assert peer is not None
    world.say(peer, Draining())
    world.say(peer, Prefilled("r", 1, 0, (10,), baton("r", 1, 3, peer)))
    assert world.output("r") == [10]
    other = world.placed(Decode, "r")
    assert other not in (None, peer)
    world.say(other, Joined("r", 1, 4096, 0, 0.01))
    assert world.sent(Release, "r")[0][0] == peer
    assert world.core.counters.migrations["migrated", "drain"] == 1


def test_pages_that_cannot_be_its_own_are_not_believed() -> None:
    world = deployment()
    world.submit(request("r"))
    world.say("d0", Prefilled("r", 1, 0, (10,), baton("r", 1, 99, "d0")))
    assert world.output("r") == []
    assert [each.attempt for _, each in world.sent(Serve, "r")] == [1, 2]


def test_siblings_follow_the_first_to_the_worker_that_has_the_prompt() -> None:
    world = deployment(decode=2)
    choices = split_choices(request("g", LONG[:32]), ["g0", "g1", "g2"])
    for choice in choices:
        world.submit(choice)
    [(peer, _)] = world.sent(Serve)
    assert [world.state(f"g{number}") for number in range(3)] == ["extending", "waiting", "waiting"]
    begun(world, "g0", peer=peer)
    assert [world.placed(Serve, f"g{number}") for number in range(3)] == [peer] * 3


def test_a_deployment_without_prefill_workers_is_paired() -> None:
    world = deployment()
    assert world.core.fleet.paired(world.core.fleet.workers["d0"])
    assert world.notes("fleet.worker_unpaired") == []


def test_short_takes_the_way_that_is_sooner_by_rates_queues_and_fetches() -> None:
    world = deployment(prefill=1, local_prefill="short")
    world.submit(request("first"))
    assert world.sent(Prefill, "first"), "no rate is told: prefill it is"
    world.loaded("p0", extend_rate=1000.0)
    world.loaded("d0", extend_rate=500.0)
    world.submit(request("prefill is faster"))
    assert world.sent(Prefill, "prefill is faster")
    world.loaded("p0", extend_rate=1000.0, queued=3, queued_tokens=5000)
    world.submit(request("prefill has a queue"))
    assert world.placed(Serve, "prefill has a queue") == "d0"
    world.loaded("d0", extend_rate=0.1)
    world.submit(request("decode is slow"))
    assert world.sent(Prefill, "decode is slow")
    assert world.core.counters.local_prompts["sooner"] == 1


def test_what_waits_at_a_worker_is_counted_until_it_is_computed_or_told() -> None:
    world = deployment()
    worker = world.core.fleet.workers["d0"]
    for rid in "abc":
        world.submit(request(rid, LONG[:32]))
    assert worker.tokens_waiting == 96
    begun(world, "a")
    world.cancel("b")
    assert worker.tokens_waiting == 32
    world.loaded("d0", running=2, queued_tokens=32)
    world.submit(request("d"))
    begun(world, "c")
    assert worker.tokens_waiting == 32 + 3, "what it told and what came since"
    assert worker.tokens_left == 3, "what it told is computed"
    world.loaded("d0", running=2, queued_tokens=40)
    assert worker.tokens_waiting == worker.tokens_left == 40, "another router's are among them"


def test_the_turn_after_an_answer_goes_where_its_prefix_is_before_the_worker_reports() -> None:
    world = deployment(decode=2, cache_miss_weight=1.0)
    for peer in ("d0", "d1"):
        world.loaded(peer, extend_rate=1000.0)
    world.submit(request("first", LONG, max_new_tokens=1))
    there = world.placed(Serve, "first")
    assert there is not None
    world.loaded(there, extend_rate=1000.0, running=1, queued_tokens=250, step_seconds=1.0)  # not all its own
    begun(world, "first", peer=there)
    world.finished(there, "first", 1)
    assert world.core.fleet.workers[there].running == 0
    world.submit(request("second", (*LONG, 1, 2, 3)))  # it begins like the one before
    assert world.placed(Serve, "second") == there


@pytest.mark.parametrize("local_prefill", ["short", "always"])
def test_a_prompt_that_is_for_prefill_goes_there_while_a_prefill_worker_is_up(local_prefill: str) -> None:
    world = deployment(prefill=1, local_prefill=local_prefill)
    world.loaded("p0", extend_rate=1.0, queued=3, queued_tokens=5000)
    world.loaded("d0", extend_rate=1000.0)
    for rid, by_prefill in (("any", False), ("prefill", True)):
        world.submit(request(rid, by_prefill=by_prefill))
    assert (world.placed(Serve, "any"), world.placed(Prefill, "prefill")) == ("d0", "p0")
    world.say("p0", Draining())
    world.submit(request("none is up", by_prefill=True))
    assert world.placed(Serve, "none is up") == "d0"


def test_short_goes_the_other_way_where_one_has_no_room() -> None:
    world = deployment(prefill=1, local_prefill="short", prefilling_per_slot=0.01)
    world.loaded("p0", extend_rate=1000.0)
    world.loaded("d0", extend_rate=10.0)
    for rid in ("a", "b"):
        world.submit(request(rid))
    assert (world.placed(Prefill, "a"), world.placed(Serve, "b")) == ("p0", "d0")


def test_short_counts_the_fetch_as_it_was_seen() -> None:
    world = deployment(prefill=1, local_prefill="short")
    world.loaded("p0", extend_rate=1000.0)
    world.loaded("d0", extend_rate=500.0)
    world.submit(request("a"))
    assert world.placed(Prefill, "a") == "p0"
    world.prefilled("p0", "a", 10)
    world.wait(1.0)
    world.say("d0", Joined("a", 1, 4096, 0, 1.0))
    world.submit(request("b"))
    assert world.placed(Serve, "b") == "d0"


PREFIX = tuple(range(1, 961))


@pytest.mark.parametrize(
    ("cached", "kind"), [(960, Serve), (0, Prefill)], ids=["decode has it", "nobody has it"]
)
def test_of_two_ways_about_as_long_a_prompt_goes_the_one_that_has_it(
    cached: int, kind: type[Prefill] | type[Serve]
) -> None:
    world = deployment(prefill=1, local_prefill="short")
    prefixes = world.core.fleet.prefixes
    for _ in range(200):
        prefixes.looked("m", "prefill", found=False, share=0.0)
    prefixes.insert("d0", block_names(PREFIX[:cached], ""))
    by_prefill = 2 * 960 / 1_000
    tokens = 960 - cached + (cached > 0)  # the last one is computed whatever is cached
    world.loaded("p0", extend_rate=1_000.0)
    world.loaded("d0", extend_rate=2 * tokens / (0.9 * by_prefill))
    world.submit(request("r", PREFIX))
    assert len(world.sent(kind, "r")) == 1


def test_short_expects_of_a_prefixs_own_worker_what_such_workers_had() -> None:
    world = ScriptedDeployment(0, 0, limits=WHOLE, local_prefill="short")
    for role in ("prefill", "decode"):
        world.up(role, f"{role[0]}0", limits=WHOLE, understands=("Serve",))
        world.loaded(f"{role[0]}0", extend_rate=1000.0 if role == "decode" else 900.0)
    prefixes = world.core.fleet.prefixes
    for _ in range(200):
        prefixes.looked("m", "prefill", found=True, share=0.9)
    world.submit(request("a", PREFIX))
    assert world.placed(Prefill, "a") == "p0", "another router has sent it there"
    for _ in range(200):
        prefixes.looked("m", "prefill", found=False, share=0.0)
    world.submit(request("b", PREFIX[::-1]))
    assert world.placed(Serve, "b") == "d0", "nothing is ever found there"


def shared_prompt(number: int, tokens: int = 960) -> tuple[int, ...]:
    return tuple(range(10_000 * number, 10_000 * number + tokens))


def test_routers_that_do_not_hear_of_each_other_agree_on_the_decode_worker_of_a_prefix() -> None:
    worlds = [deployment(decode=4), deployment(decode=4)]
    worlds[1].submit(request("of the second alone"))
    for world in worlds:
        for number in range(4):
            world.loaded(f"d{number}", extend_rate=10_000.0 + number)
    chosen = []
    for number in range(1, 9):
        for world in worlds:
            world.submit(request(f"r{number}", shared_prompt(number)))
            chosen.append(world.placed(Serve, f"r{number}") or "")
            begun(world, f"r{number}", peer=chosen[-1], finish="length")
            world.loaded(chosen[-1], extend_rate=10_000.0 + int(chosen[-1][1:]))
    assert chosen[::2] == chosen[1::2]
    assert len(set(chosen)) > 1


def test_a_prefix_whose_own_decode_worker_never_has_it_goes_where_it_is_soonest() -> None:
    world = deployment(decode=2)
    world.loaded("d0", extend_rate=1_000.0)
    world.loaded("d1", extend_rate=1_001.0)
    for number in range(1, 100):
        world.submit(request(f"r{number}", shared_prompt(number)))
        here = world.placed(Serve, f"r{number}")
        assert here is not None
        begun(world, f"r{number}", peer=here, finish="length")
        world.loaded(here, extend_rate=1_000.0 if here == "d0" else 1_001.0)
    last = [world.placed(Serve, f"r{number}") for number in range(80, 100)]
    assert set(last) == {"d1"}, "nothing was ever found"


def test_prompts_for_which_nobody_has_a_turn_reckon_no_seconds_and_look_at_each_worker_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = deployment(decode=3)
    for number in range(3):
        world.loaded(f"d{number}", extend_rate=100.0, queued=1, queued_tokens=1_000)
    for number in range(5):
        world.submit(request(f"r{number}", LONG, tenant=f"t{number}"))
    looks = list[str]()
    monkeypatch.setattr(PromptSeconds, "computed", lambda *_: pytest.fail("nobody could take it"))
    monkeypatch.setattr(Worker, "may_have_turn", lambda worker: looks.append(worker.peer))
    world.loaded("d0", extend_rate=100.0, queued=1, queued_tokens=999)
    assert looks == ["d0", "d1", "d2"]
    assert world.core.requests_by_state["waiting"] == 5


def test_while_a_stream_is_late_a_tenant_with_a_prompt_at_decode_begins_nothing_more() -> None:
    world = deployment(prefill=1, decode=2, ready_seconds=2.0)
    world.loaded("d0", slots_free=0)
    world.loaded("d1", free_pages=2)
    world.submit(request("late", LONG, tenant="a"))
    world.prefilled("p0", "late", 10)
    world.wait(2.1)
    world.say("p0", Draining())
    for rid, tenant in (("one", "b"), ("two", "b"), ("first", "c")):
        world.submit(request(rid, tenant=tenant))
    assert [world.state(rid) for rid in ("late", "one", "two", "first")] == [
        "ready",
        "extending",
        "waiting",
        "extending",
    ]


def test_what_a_prompt_takes_at_decode_counts_until_the_first_token_and_not_in_front_of_decode() -> None:
    world = deployment(local_prefill="always")
    world.submit(request("r"))
    world.wait(5.0)
    begun(world, "r")
    assert world.core._backpressure.first_token_seconds > 0
    assert world.core._backpressure.prefill_seconds == 0.0


def test_short_learns_nothing_of_fetches_from_a_worker_that_drains() -> None:
    """All of its streams move at once, and each waits for those before it."""
    world = deployment(decode=2, local_prefill="short")
    world.submit(request("r"))
    here = world.placed(Serve, "r")
    assert here is not None
    there = "d1" if here == "d0" else "d0"
    begun(world, "r", peer=here)
    world.say(here, Draining())
    world.migrating(here, "r", 1)
    assert world.placed(Decode, "r") == there
    world.wait(9.0)
    world.say(there, Joined("r", 1, 4096, 0, 9.0))
    assert world.core._local_prompts._seconds.fetched(("weights", "kv"), 100, world.now) == 0.0


def test_both_ways_are_shown_and_measured_whichever_it_goes() -> None:
    world = deployment(prefill=1, local_prefill="short", cache_miss_weight=2.0)
    world.loaded("p0", extend_rate=100.0)
    world.loaded("d0", extend_rate=50.0)
    world.submit(request("p", LONG[:40]))
    world.loaded("p0", extend_rate=25.0)
    world.submit(request("d", LONG[:40]))
    ways = "foreseen at decode: 0.800 s, by way of prefill: "
    assert _whys(world, "p") == [f"fewest queued: 0; {ways}0.400 s"], "a token takes its time once"
    assert _whys(world, "d") == [f"{ways}3.200 s"]  # behind those of the other
    world.wait(0.5)
    world.say("p0", Prefilled("p", 1, 0, (10,), baton("p", 1, 40, "p0")))
    begun(world, "d")
    world.wait(0.25)
    world.say("d0", Joined("p", 1, 4096, 0, 0.01))
    counters = world.core.counters
    assert [*counters.way_prefill_foreseen, *counters.way_prefill_real] == pytest.approx([0.4, 0.75])
    assert [*counters.way_decode_foreseen, *counters.way_decode_real] == pytest.approx([0.8, 0.5])


def test_a_prompt_that_moves_before_its_first_token_tells_of_no_way() -> None:
    world = deployment(decode=2)
    world.loaded("d0", extend_rate=50.0)
    world.loaded("d1", extend_rate=50.0)
    world.submit(request("r"))
    peer = world.placed(Serve, "r")
    assert peer is not None
    world.say(peer, Draining())
    world.say(peer, Prefilled("r", 1, 0, (10,), baton("r", 1, 3, peer)))
    other = world.placed(Decode, "r")
    assert other is not None
    world.say(other, Joined("r", 1, 4096, 0, 0.01))
    counters = world.core.counters
    assert not counters.way_prefill_real
    assert not counters.way_decode_real


def _whys(world: ScriptedDeployment, rid: str) -> list[str]:
    shown = world.core.debug(rid)
    assert shown is not None
    workers = shown["workers"]
    assert isinstance(workers, list)
    return [each["why"] for each in workers]

"""Who gets a request: each policy, what it may never do, and how light traffic spreads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest

from router.config import RouterConfig
from router.core.fleet.placement import (
    decode_workers,
    place_decode,
    place_prefill,
    prefill_workers,
)
from router.core.fleet.prefix_index import BLOCK_TOKENS, PrefixIndex, block_names
from router.core.fleet.worker import Worker
from router.core.fleet.workers import Fleet
from router.placement_policies import POLICIES, Need, Placement, PlacementReason
from shared.wire.messages import Limits, Load, Role
from tests.unit.router.deployment import hello, named

SETTINGS = RouterConfig()
NEED = Need(rid="r", model_name="m", tokens=100, tokens_max=200)
NOTHING_CACHED = PrefixIndex(1)
HANDED = replace(NEED, model="weights", kv_format="kv")


def fleet_of(role: Role, count: int, **fields: object) -> tuple[Fleet, Sequence[Worker]]:
    fleet = Fleet(PrefixIndex(1024))
    for number in range(count):
        fleet.up(f"{role[0]}{number}", hello(role, f"{role[0]}{number}", **fields))
    return fleet, fleet.of_role(role)


def chosen(
    need: Need,
    workers: Sequence[Worker],
    policy: str,
    role: Role = "prefill",
    prefixes: PrefixIndex = NOTHING_CACHED,
) -> str | None:
    settings = SETTINGS.model_copy(update={"prefill_policy": policy, "decode_policy": policy})
    place = place_prefill if role == "prefill" else place_decode
    choice = place(need, workers, prefixes, settings, 0.0)
    return choice.worker.peer if choice else None


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "follow_bootstrap_room"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_equal_workers_share_equally_under_every_policy_without_sessions(policy: str, role: Role) -> None:
    fleet, workers = fleet_of(role, 4)
    shares: Counter[str | None] = Counter()
    for number in range(400):
        peer = chosen(replace(HANDED, rid=f"r{number}"), workers, policy, role)
        assert peer is not None
        fleet.mark_chosen(fleet.workers[peer])
        shares[peer] += 1
    assert len(shares) == 4
    assert min(shares.values()) > 60


@pytest.mark.parametrize("policy", ["total_requests", "total_tokens", "cache_aware"])
def test_assignments_count_before_the_worker_reports_them(policy: str) -> None:
    _, workers = fleet_of("prefill", 2)
    workers[0].assign("a", tokens=500, pages=1)
    assert chosen(NEED, workers, policy) == "p1"
    workers[1].assign("b", tokens=900, pages=1)
    workers[1].assign("c", tokens=900, pages=1)
    assert chosen(NEED, workers, policy) == "p0"


def test_a_report_replaces_the_guess_but_never_hides_what_this_router_has_there() -> None:
    _, (worker, _) = fleet_of("prefill", 2)
    worker.assign("a", tokens=500, pages=1)
    assert worker.tokens == 500
    worker.report(Load(queued_tokens=800, slots_free=4))
    assert worker.tokens == 800
    worker.assign("b", tokens=100, pages=1)
    assert worker.tokens == 900
    worker.report(Load(queued_tokens=0, slots_free=4))
    assert worker.tokens == 600
    worker.unassign("a")
    worker.unassign("b")
    assert worker.tokens == 0


def test_cache_aware_goes_where_the_prefix_was_sent_unless_the_queue_there_is_longer() -> None:
    fleet, workers = fleet_of("prefill", 2)
    prompt = tuple(range(640))
    need = replace(NEED, tokens=640, tokens_max=700, blocks=block_names(prompt, ""))
    fleet.prefixes.insert("p1", need.blocks)
    assert chosen(need, workers, "cache_aware", prefixes=fleet.prefixes) == "p1"
    workers[1].assign("a", tokens=1_200, pages=1)
    assert chosen(need, workers, "cache_aware", prefixes=fleet.prefixes) == "p1", "a miss would cost 2 * 639"
    workers[1].assign("b", tokens=100, pages=1)
    assert chosen(need, workers, "cache_aware", prefixes=fleet.prefixes) == "p0"


def fleets_apart(count: int, prompt_len: int = 640) -> tuple[list[Fleet], Need]:
    """As many routers' views of four prefill workers, each in an order of its own, and a prompt."""
    fleets = [Fleet(PrefixIndex(1024)) for _ in range(count)]
    for shift, fleet in enumerate(fleets):
        for number in range(4):
            peer = f"p{(number + shift) % 4}"
            fleet.up(peer, hello("prefill", peer))
    blocks = block_names(tuple(range(prompt_len)), "")
    return fleets, replace(NEED, tokens=prompt_len, tokens_max=prompt_len + 1, blocks=blocks)


def placed(fleet: Fleet, need: Need) -> Placement[Worker]:
    choice = place_prefill(need, fleet.of_role("prefill"), fleet.prefixes, SETTINGS, 0.0)
    assert choice is not None
    return choice


def test_routers_that_have_never_heard_of_a_prefix_choose_the_same_worker() -> None:
    fleets, need = fleets_apart(3)
    choices = [placed(fleet, need) for fleet in fleets]
    assert len({choice.worker.peer for choice in choices}) == 1
    assert {choice.reason for choice in choices} == {"own"}


def test_prompts_that_differ_behind_their_second_block_have_one_own_worker_and_others_are_spread() -> None:
    (fleet,), need = fleets_apart(1)
    own = placed(fleet, need).worker
    other_end = block_names((*range(2 * BLOCK_TOKENS), *([7] * BLOCK_TOKENS)), "")
    assert placed(fleet, replace(need, blocks=other_end)).worker is own
    spread = Counter(
        placed(fleet, replace(need, blocks=block_names((number, *range(639)), ""))).worker.peer
        for number in range(400)
    )
    assert len(spread) == 4
    assert min(spread.values()) > 60


def test_only_prefixes_of_a_lost_worker_get_another_one() -> None:
    (fleet,), need = fleets_apart(1)
    needs = [replace(need, blocks=block_names((number, *range(639)), "")) for number in range(200)]
    before = [placed(fleet, each).worker.peer for each in needs]
    fleet.down("p2")
    after = [placed(fleet, each).worker.peer for each in needs]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "p2")
    assert "p2" in before


def test_a_prompt_below_128_tokens_has_no_own_worker() -> None:
    (fleet,), need = fleets_apart(1, 2 * BLOCK_TOKENS - 1)
    assert placed(fleet, need).reason == "least"


def test_the_own_worker_is_left_where_it_is_far_behind_or_was_never_of_use() -> None:
    (fleet,), need = fleets_apart(1)
    own = placed(fleet, need).worker
    own.assign("a", tokens=1_280, pages=1)
    assert placed(fleet, need).worker is own, "a miss would cost as much"
    own.assign("b", tokens=1, pages=1)
    assert placed(fleet, need).worker is not own
    own.unassign("b")
    for _ in range(100):
        fleet.prefixes.looked(need.model_name, "prefill", found=False, share=0.0)
    assert placed(fleet, need).worker is not own, (
        "no other router has sent anything, so only a tie goes to it"
    )
    own.unassign("a")
    assert placed(fleet, need).worker is own


def test_the_own_worker_gets_nothing_while_it_drains() -> None:
    (fleet,), need = fleets_apart(1)
    own = placed(fleet, need).worker
    fleet.drain(own)
    assert placed(fleet, need).worker is not own


def test_a_worker_that_is_far_behind_costs_others_no_hit() -> None:
    fleet, workers = fleet_of("prefill", 3)
    need = replace(NEED, tokens=640, tokens_max=700, blocks=block_names(tuple(range(640)), ""))
    fleet.prefixes.insert("p2", need.blocks)
    workers[1].assign("a", tokens=20_000, pages=1)
    workers[2].assign("b", tokens=500, pages=1)
    choice = placed(fleet, need)
    assert (choice.worker, choice.reason) == (workers[2], "cached")


def test_one_prefix_for_all_is_computed_by_more_than_one_worker() -> None:
    fleet, (first, second) = fleet_of("prefill", 2)
    need = replace(NEED, tokens=640, tokens_max=700, blocks=block_names(tuple(range(640)), ""))
    fleet.prefixes.insert("p0", need.blocks)
    for number in range(13):
        assert placed(fleet, need).worker is first, number
        first.assign(f"r{number}", tokens=100, pages=1)
        first.unassign(f"r{number}")
    choice = placed(fleet, need)
    assert (choice.worker, choice.reason, choice.hit_tokens) == (second, "spread", 0)
    later = place_prefill(need, [first, second], fleet.prefixes, SETTINGS, 60.0)
    assert later is not None
    assert later.worker is first, "what it has computed long ago counts no more"


def test_a_hot_prefix_cannot_starve_its_pod() -> None:
    fleet, workers = fleet_of("prefill", 2, limits=Limits(200_000, 16, 100_000, 8, 1000))
    blocks = block_names(tuple(range(50_000)), "")
    need = replace(NEED, tokens=50_000, tokens_max=50_001, blocks=blocks)
    fleet.prefixes.insert("p0", blocks)
    workers[0].assign("a", tokens=10_000, pages=1)
    assert chosen(need, workers, "cache_aware", prefixes=fleet.prefixes) == "p1"
    settings = SETTINGS.model_copy(update={"imbalance_tokens_max": 20_000})
    choice = place_prefill(need, workers, fleet.prefixes, settings, 0.0)
    assert choice is not None
    assert choice.worker.peer == "p0"
    assert choice.hit_tokens > 0
    assert choice.reason == "cached"


def test_a_short_common_prefix_does_not_attract() -> None:
    fleet, workers = fleet_of("prefill", 2)
    need = replace(NEED, blocks=block_names(tuple(range(BLOCK_TOKENS)), ""))
    fleet.prefixes.insert("p0", need.blocks)
    fleet.mark_chosen(workers[0])
    assert chosen(need, workers, "cache_aware", prefixes=fleet.prefixes) == "p1"


def test_power_of_two_never_takes_the_fuller_of_its_two_and_tries_all_pairs() -> None:
    _, workers = fleet_of("prefill", 4)
    workers[3].assign("a", tokens=1000, pages=1)
    picks = {chosen(replace(NEED, rid=f"r{n}"), workers, "power_of_two") for n in range(100)}
    assert picks == {"p0", "p1", "p2"}


def test_a_session_stays_with_its_worker_and_only_those_of_a_lost_worker_move() -> None:
    fleet, workers = fleet_of("prefill", 4)
    sessions = [replace(NEED, session=f"s{number}") for number in range(200)]
    before = [chosen(need, workers, "follow_bootstrap_room") for need in sessions]
    assert set(before) == {"p0", "p1", "p2", "p3"}
    fleet.down("p2")
    after = [chosen(need, fleet.of_role("prefill"), "follow_bootstrap_room") for need in sessions]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "p2")
    assert "p2" not in after


def test_decode_looks_for_room_first_then_for_the_emptier_worker_for_its_size() -> None:
    fleet = Fleet(PrefixIndex(1024))
    fleet.up("small", hello("decode", "small", limits=Limits(4096, 16, 100, 8, 1000)))
    fleet.up("big", hello("decode", "big", limits=Limits(4096, 16, 1000, 8, 1000)))
    small, big = fleet.of_role("decode")
    small.report(Load(running_tokens=400, free_pages=75, slots_free=8))
    big.report(Load(running_tokens=2000, free_pages=875, slots_free=8))
    assert chosen(HANDED, [small, big], "total_tokens", "decode") == "big"
    big.report(Load(running_tokens=2000, free_pages=875, slots_free=0))
    assert chosen(HANDED, [small, big], "total_tokens", "decode") == "small"
    small.report(Load(running_tokens=0, free_pages=6, slots_free=8))
    assert chosen(HANDED, [small, big], "total_tokens", "decode") is None


def held_by(fleet: Fleet, tokens: dict[str, int], **told: float) -> None:
    """Decode workers hold so many tokens, and tell seconds of a step, by name."""
    for peer, held in tokens.items():
        seconds = told.get(peer, 0.0)
        fleet.workers[peer].report(
            Load(running_tokens=held, free_pages=500, slots_free=8, step_seconds=seconds)
        )


def test_decode_goes_where_least_is_to_be_fetched_unless_that_one_holds_ten_times_as_much_more() -> None:
    fleet, workers = fleet_of("decode", 2)
    need = replace(HANDED, tokens=640, tokens_max=700, blocks=block_names(tuple(range(640)), ""))
    fleet.prefixes.insert("d1", need.blocks)
    for held, expected in ((6_000, "d1"), (6_500, "d0")):
        held_by(fleet, {"d0": 0, "d1": held})
        assert chosen(need, workers, "cache_aware", "decode", fleet.prefixes) == expected


def test_a_decode_worker_whose_steps_take_four_times_as_long_holds_a_quarter() -> None:
    fleet, workers = fleet_of("decode", 2)
    need = replace(HANDED, tokens=100, tokens_max=200)
    for held, expected in ((600, "d1"), (800, "d0")):
        held_by(fleet, {"d0": 100, "d1": held}, d0=0.08, d1=0.02)
        assert chosen(need, workers, "cache_aware", "decode", fleet.prefixes) == expected, held
    held_by(fleet, {"d0": 0, "d1": 10_000}, d0=1e9, d1=1e-300)
    assert chosen(need, workers, "cache_aware", "decode", fleet.prefixes) == "d0", (
        "no worker is believed more"
    )


def test_routers_that_have_never_heard_of_a_prompt_choose_one_decode_worker_while_it_is_not_much_fuller() -> (
    None
):
    fleet, workers = fleet_of("decode", 4)
    need = replace(HANDED, tokens=640, tokens_max=700, blocks=block_names(tuple(range(640)), ""))
    own = chosen(need, workers, "cache_aware", "decode", fleet.prefixes)
    assert own is not None
    assert chosen(need, workers[::-1], "cache_aware", "decode", fleet.prefixes) == own
    fetched_elsewhere(fleet, 0.0)
    held_by(fleet, {worker.peer: 6_000 * (worker.peer == own) for worker in workers})
    assert chosen(need, workers, "cache_aware", "decode", fleet.prefixes) == own
    held_by(fleet, {worker.peer: 6_500 * (worker.peer == own) for worker in workers})
    assert chosen(need, workers, "cache_aware", "decode", fleet.prefixes) != own
    fetched_elsewhere(fleet, 1.0)
    assert chosen(need, workers, "cache_aware", "decode", fleet.prefixes) == own, "others may send it there"
    held_by(fleet, {worker.peer: 11_500 * (worker.peer == own) for worker in workers})
    assert chosen(need, workers, "cache_aware", "decode", fleet.prefixes) != own


def fetched_elsewhere(fleet: Fleet, share: float) -> None:
    """Lately own decode workers had this share of what nobody was known to have."""
    for _ in range(200):
        fleet.prefixes.looked("m", "fetched", found=share > 0, share=share)


@pytest.mark.parametrize(("share", "expected"), [(0.0, "other"), (1.0, "own")])
def test_a_turn_goes_to_the_own_worker_of_its_conversation_while_other_routers_send_turns_there(
    share: float, expected: str
) -> None:
    fleet, workers = fleet_of("decode", 4)
    need = replace(HANDED, tokens=1_280, tokens_max=1_300, blocks=block_names(tuple(range(1_280)), ""))
    own = chosen(need, workers, "cache_aware", "decode", fleet.prefixes)
    other = next(worker.peer for worker in workers if worker.peer != own)
    fetched_elsewhere(fleet, share)
    fleet.prefixes.insert(other, need.blocks[:4])  # 256 tokens: the first turn, that this router has sent
    best = chosen(need, workers, "cache_aware", "decode", fleet.prefixes)
    assert best == {"own": own, "other": other}[expected]
    fleet.prefixes.insert(other, need.blocks)
    assert chosen(need, workers, "cache_aware", "decode", fleet.prefixes) == other, "it has all of it"


def test_room_shrinks_with_every_assignment_not_yet_reported() -> None:
    _, (worker,) = fleet_of("decode", 1)
    worker.report(Load(free_pages=10, slots_free=4))
    assert worker.has_room(10, "", 1.0, 0.0)
    worker.assign("a", tokens=64, pages=4)
    assert worker.has_room(6, "", 1.0, 0.0)
    assert not worker.has_room(7, "", 1.0, 0.0)
    worker.report(Load(free_pages=7, slots_free=1))
    assert worker.has_room(7, "", 1.0, 0.0)
    worker.assign("b", tokens=16, pages=1)
    assert not worker.has_room(1, "", 1.0, 0.0), "the one slot is taken"


def test_a_worker_that_keeps_pages_for_the_growth_of_others_is_offered_no_more_than_the_rest() -> None:
    _, (worker,) = fleet_of("decode", 1)
    worker.report(Load(running=1, free_pages=10, slots_free=4, pages_for_new=3))
    assert worker.has_room(3, "", 1.0, 0.0)
    assert not worker.has_room(4, "", 1.0, 0.0)
    assert worker.has_room(10, "", 1.0, 0.0, whatever_told=True)
    worker.assign("a", tokens=16, pages=1, tenant="first")
    assert worker.has_room(9, "second", 1.0, 0.0), "of a tenant that has nothing here"
    assert not worker.has_room(3, "first", 1.0, 0.0)
    worker.unassign("a")
    worker.report(Load(free_pages=10, slots_free=4, pages_for_new=3))
    assert worker.has_room(10, "", 1.0, 0.0), "there are no others"


def test_slots_that_a_worker_keeps_are_offered_to_tenants_that_hold_little_there() -> None:
    _, (worker,) = fleet_of("decode", 1)
    worker.report(Load(running=3, free_pages=10, slots_free=2, slots_for_new=0))
    worker.assign("a", tokens=16, pages=1, tenant="greedy")
    worker.assign("b", tokens=16, pages=1, tenant="greedy")
    worker.assign("c", tokens=16, pages=1, tenant="small")
    worker.report(Load(running=6, free_pages=7, slots_free=2, slots_for_new=0))
    assert not worker.has_room(1, "greedy", 1.0, 0.0)
    assert not worker.has_room(1, "greedy", 1.0, 0.0, whatever_told=True)
    assert worker.has_room(1, "small", 1.0, 0.0), "it has fewer here than another"
    assert worker.has_room(1, "nobody's", 1.0, 0.0)
    worker.refused.add("small", worker.load_number)
    assert not worker.has_room(1, "small", 1.0, 0.0), "the worker has refused it"
    worker.report(Load(running=5, free_pages=8, slots_free=3, slots_for_new=1))
    assert worker.has_room(1, "greedy", 1.0, 0.0)
    worker.assign("d", tokens=16, pages=1, tenant="nobody's")
    assert not worker.has_room(1, "greedy", 1.0, 0.0), "what is offered since counts"


def test_a_worker_that_drains_gets_nothing() -> None:
    _, workers = fleet_of("prefill", 2)
    workers[0].report(Load(accepting=False))
    assert chosen(NEED, workers, "round_robin") == "p1"
    assert chosen(NEED, workers[:1], "round_robin") is None


def test_pages_move_only_between_equal_formats_and_tokens_continue_only_on_equal_weights() -> None:
    fleet, _ = fleet_of("decode", 1)
    fleet.up("format", hello("decode", "format", kv_format="other"))
    fleet.up("weights", hello("decode", "weights", model="third"))
    fleet.up("small", hello("decode", "small", limits=Limits(150, 16, 512, 4, 1000)))
    assert [worker.peer for worker in decode_workers(HANDED, fleet)] == ["d0"]
    fleet.up("p0", hello("prefill", "p0"))
    fleet.up("p1", hello("prefill", "p1", model="other"))
    assert [worker.peer for worker in prefill_workers(NEED, fleet)] == ["p0"], "p1 has no counterpart"
    fleet.up("pair", hello("decode", "pair", model="other"))
    assert [worker.peer for worker in prefill_workers(NEED, fleet)] == ["p0", "p1"]
    assert [worker.peer for worker in prefill_workers(replace(NEED, model="other"), fleet)] == ["p1"]


def test_a_continuation_prefers_equal_determinism_and_workers_that_have_not_failed_it() -> None:
    fleet, _ = fleet_of("prefill", 1, determinism="avx2")
    fleet.up("p1", hello("prefill", "p1", determinism="avx512"))
    workers = fleet.of_role("prefill")
    assert chosen(replace(NEED, determinism="avx512"), workers, "round_robin") == "p1"
    assert chosen(replace(NEED, determinism="sve"), workers, "round_robin") == "p0", "a preference, no veto"
    assert chosen(replace(NEED, avoided=("p0",)), workers, "round_robin") == "p1"
    assert chosen(replace(NEED, avoided=("p0", "p1")), workers, "round_robin") == "p0"


def test_every_choice_says_why() -> None:
    _, workers = fleet_of("prefill", 2)
    for policy in POLICIES:
        choice = place_prefill(
            NEED, workers, NOTHING_CACHED, SETTINGS.model_copy(update={"prefill_policy": policy}), 0.0
        )
        assert choice is not None
        assert choice.why
        assert choice.reason in get_args(PlacementReason)


def test_block_names_tell_prefixes_and_tenants_apart() -> None:
    prompt = tuple(range(3 * BLOCK_TOKENS + 5))
    names = block_names(prompt, "")
    assert len(names) == 3
    assert block_names((*prompt[: 2 * BLOCK_TOKENS], *([9] * BLOCK_TOKENS)), "")[:2] == names[:2]
    assert block_names((5, *prompt[1:]), "")[1] != names[1]
    assert not set(block_names(prompt, "tenant")) & set(names)


def test_block_names_are_the_same_in_every_process_and_version() -> None:
    assert block_names(tuple(range(2 * BLOCK_TOKENS)), "tenant")[1].hex() == "60f60c1c0a63da3f"


def test_the_prefix_index_is_bounded_and_forgets_tails_before_heads() -> None:
    index = PrefixIndex(blocks_max=4)
    index.up("p0", pool_tokens=0)
    index.insert("p0", named((1, 2, 3)))
    index.insert("p0", named((1, 7, 8)))
    assert len(index) == 4
    assert index.hits(named((1, 7, 8))).all() == {"p0": 3 * BLOCK_TOKENS}
    assert index.hits(named((1, 2, 3))).all() == {"p0": 2 * BLOCK_TOKENS}
    index.insert("p0", named(range(100, 200)))
    assert len(index) == 4
    assert index.hits(named(range(100, 200))).all() == {"p0": 4 * BLOCK_TOKENS}


def test_a_worker_is_not_credited_with_more_than_its_pool_holds() -> None:
    index = PrefixIndex(blocks_max=100)
    index.up("p0", pool_tokens=3 * BLOCK_TOKENS)
    index.insert("p0", named((1, 2)))
    index.insert("p0", named((3, 4)))
    assert index.hits(named((1, 2))).all() == {"p0": BLOCK_TOKENS}
    assert index.hits(named((3, 4))).all() == {"p0": 2 * BLOCK_TOKENS}


def test_one_walk_finds_the_hits_of_all_workers_and_one_bound_holds_for_all_of_them() -> None:
    index = PrefixIndex(blocks_max=8)
    for peer in ("p0", "p1"):
        index.up(peer, pool_tokens=0)
    index.insert("p0", named((1, 2, 3, 4)))
    index.insert("p1", named((1, 2, 9)))
    assert index.hits(named((1, 2, 3, 5))).all() == {"p0": 3 * BLOCK_TOKENS, "p1": 2 * BLOCK_TOKENS}
    assert index.hits(named((7,))).all() == {}
    index.up("p2", pool_tokens=0)
    assert len(index) == 4, "each has the share of a third worker less"
    assert index.hits(named((1, 2, 3))).all() == {"p0": 2 * BLOCK_TOKENS, "p1": 2 * BLOCK_TOKENS}
    index.down("p0")
    index.up("p3", pool_tokens=0)
    assert index.hits(named((1, 2))).all() == {"p1": 2 * BLOCK_TOKENS}, (
        "a new worker knows nothing of an old one"
    )


def test_names_of_known_blocks_are_not_computed_again() -> None:
    tokens = tuple(range(4 * BLOCK_TOKENS))
    known = block_names(tokens[: 2 * BLOCK_TOKENS + 5], "key")
    assert block_names(tokens, "key", known) == block_names(tokens, "key")


def test_parameters_that_a_worker_would_ignore_never_reach_it() -> None:
    fleet, (old, new) = Fleet(PrefixIndex(1024)), ("p-old", "p-new")
    fleet.up(old, hello("prefill", old))
    fleet.up(new, hello("prefill", new, features=("logprobs", "grammar")))
    asking = replace(NEED, tokens_max=101, features=frozenset({"logprobs"}))
    assert [worker.peer for worker in prefill_workers(asking, fleet)] == [new]
    assert prefill_workers(replace(asking, features=frozenset({"bad_words"})), fleet) == []
    assert len(prefill_workers(replace(asking, features=frozenset()), fleet)) == 2

"""What the router does with the requests of one prompt, as `n` asks for them."""

from __future__ import annotations

import pytest

from router.core.effects import RequestCompleted, RequestFailed
from router.core.requests.sampling_group import PATIENCE_SECONDS, SEEDS, split_choices
from shared.wire.messages import Cancel, Decode, Limits, Prefill
from tests.unit.router.deployment import ScriptedDeployment, request

PROMPT = tuple(range(1, 101))
RIDS = ("a", "b", "c", "d")
SLOTS = Limits(context_len=4096, page_size=16, pages=512, slots=8, vocab_size=1000)


def group(world: ScriptedDeployment, max_new_tokens: int = 8, tenant: str = "") -> None:
    for each in split_choices(request("whole", PROMPT, max_new_tokens, tenant=tenant), RIDS):
        world.submit(each)


def placed(world: ScriptedDeployment) -> list[tuple[str, str]]:
    """Workers and requests of all `Prefill` so far."""
    return [(peer, message.rid) for peer, message in world.sent(Prefill)]


def test_choice_0_is_the_answer_of_one_alone_and_the_others_have_the_next_seeds() -> None:
    alone = request("whole", PROMPT)
    made = split_choices(alone, RIDS)
    assert [each.params.seed for each in made] == [0, 1, 2, 3]
    assert made[0].params == alone.params
    (only,) = split_choices(alone, ("x",))
    assert (only.rid, only.params, only.sampling_group) == ("x", alone.params, "")


def test_seeds_start_over_behind_the_last_one() -> None:
    last = split_choices(request("whole", PROMPT), ("a",))[0]
    params = type(last.params)(max_new_tokens=1, seed=SEEDS - 1)
    seeds = [
        each.params.seed for each in split_choices(request("whole", PROMPT, params=params), ("a", "b", "c"))
    ]
    assert seeds == [SEEDS - 1, 0, 1]


def test_the_first_has_the_prompt_scored_for_all() -> None:
    params = request("whole", PROMPT).params
    asked = request(
        "whole", PROMPT, params=type(params)(max_new_tokens=1, seed=0, logprobs=2, prompt_logprobs=5)
    )
    made = split_choices(asked, RIDS)
    assert [each.params.prompt_logprobs for each in made] == [5, -1, -1, -1]
    assert [each.params.logprobs for each in made] == [2] * 4
    assert split_choices(asked, ("x",))[0].params.prompt_logprobs == 5


def test_the_others_wait_for_the_first_and_follow_it_to_both_workers() -> None:
    world = ScriptedDeployment(3, 3, limits=SLOTS, prefill_policy="round_robin", decode_policy="round_robin")
    group(world)
    assert placed(world) == [("p0", "a")]
    assert [world.state(rid) for rid in RIDS] == ["prefilling", "waiting", "waiting", "waiting"]
    world.prefilled("p0", "a", 10)
    assert placed(world) == [("p0", rid) for rid in RIDS]
    for rid in RIDS[1:]:
        world.prefilled("p0", rid, 10)
    assert [(peer, message.rid) for peer, message in world.sent(Decode)] == [("d0", rid) for rid in RIDS]


def test_a_prompt_is_counted_once() -> None:
    world = ScriptedDeployment(limits=SLOTS)
    group(world, max_new_tokens=1)
    for rid in RIDS:
        world.prefilled("p0", rid, 10, finish="length")
    usages = [world.outcome(rid).usage for rid in RIDS]  # type: ignore[union-attr]
    assert [(usage.prompt_tokens, usage.completion_tokens) for usage in usages] == [
        (100, 1),
        (0, 1),
        (0, 1),
        (0, 1),
    ]
    assert [usage.cached_tokens for usage in usages] == [2, 0, 0, 0]
    assert (world.core.counters.prompt_tokens, world.core.counters.cached_tokens) == (100, 2)
    world.assert_nothing_left()


def test_siblings_are_not_charged_for_the_prompt_of_their_tenant() -> None:
    world = ScriptedDeployment(limits=SLOTS, tenant_tokens_per_minute=150)
    group(world, tenant="t")
    assert [world.state(rid) for rid in RIDS] == ["prefilling", "waiting", "waiting", "waiting"]
    world.submit(request("later", PROMPT, tenant="t"))
    refused = world.outcome("later")
    assert isinstance(refused, RequestFailed)
    assert refused.code == "tokens_per_minute"


@pytest.mark.parametrize("end", ["cancelled", "lost"])
def test_another_one_computes_the_prompt_if_the_first_does_not(end: str) -> None:
    world = ScriptedDeployment(2, 1, limits=SLOTS)
    group(world)
    if end == "cancelled":
        world.cancel("a")
        assert world.sent(Cancel) == [("p0", Cancel("a", 1))]
    else:
        world.down("p0")
    (_, second) = placed(world)
    assert second[0] == "p1"
    one = second[1]
    assert sum(world.state(rid) == "prefilling" for rid in RIDS if rid != "a" or end == "lost") == 1
    attempt = 2 if one == "a" else 1
    world.prefilled("p1", one, 10, attempt=attempt)
    assert {peer for peer, _ in placed(world)[1:]} == {"p1"}
    assert len(placed(world)) == (5 if end == "lost" else 4)


def test_a_lost_worker_with_the_prompt_costs_one_more_prompt() -> None:
    one_slot = Limits(context_len=4096, page_size=16, pages=512, slots=1, vocab_size=1000)
    world = ScriptedDeployment(2, 1, limits=one_slot, prefilling_per_slot=1.0)
    group(world)
    world.prefilled("p0", "a", 10)
    assert placed(world) == [("p0", "a"), ("p0", "b")], "p0 takes one at a time, and p1 none of them"
    world.down("p0")
    states = [world.state(rid) for rid in RIDS]
    assert states.count("prefilling") == 1, "one computes the prompt once more"
    assert placed(world)[-1][0] == "p1"


def test_siblings_wait_for_the_worker_with_their_prompt_only_for_a_while() -> None:
    one_slot = Limits(context_len=4096, page_size=16, pages=512, slots=1, vocab_size=1000)
    world = ScriptedDeployment(2, 1, limits=one_slot, prefilling_per_slot=1.0)
    group(world)
    world.prefilled("p0", "a", 10)
    assert placed(world) == [("p0", "a"), ("p0", "b")]
    world.wait(PATIENCE_SECONDS)
    assert placed(world) == [("p0", "a"), ("p0", "b"), ("p1", "c")]


def test_siblings_outlive_their_waiting_time_while_the_prompt_is_computed() -> None:
    world = ScriptedDeployment(limits=SLOTS, waiting_seconds_max=5.0)
    group(world)
    world.wait(12.0)
    assert [world.state(rid) for rid in RIDS] == ["prefilling", "waiting", "waiting", "waiting"]
    world.prefilled("p0", "a", 10)
    assert [world.state(rid) for rid in RIDS[1:]] == ["prefilling"] * 3


def test_other_requests_pass_siblings_that_wait_for_one_of_them() -> None:
    world = ScriptedDeployment(2, 1, limits=SLOTS)
    group(world)
    world.submit(request("other", (7, 8, 9)))
    assert world.state("other") == "prefilling"


def test_siblings_that_all_end_leave_nothing() -> None:
    world = ScriptedDeployment(limits=SLOTS)
    group(world, max_new_tokens=2)
    for rid in RIDS:
        world.prefilled("p0", rid, 10)
        world.joined("d0", rid)
        world.generated("d0", rid, 1, 11)
        world.finished("d0", rid, 2)
    assert all(isinstance(world.outcome(rid), RequestCompleted) for rid in RIDS)
    assert len(world.core._requests.sampling_groups) == 0
    world.assert_nothing_left()


def test_siblings_share_the_pages_of_their_prompt_at_the_decode_worker() -> None:
    """The prompt takes 7 pages. The pool has room for it and for one more page of each sibling, not for two prompts."""
    small = Limits(context_len=4096, page_size=16, pages=10, slots=8, vocab_size=1000)
    world = ScriptedDeployment(1, 0, limits=SLOTS)
    world.up("decode", "d0", limits=small)
    world.loaded("d0", free_pages=10, slots_free=8)
    group(world)
    world.prefilled("p0", "a", 10)
    for rid in RIDS[1:]:
        world.prefilled("p0", rid, 10)
    assert [world.state(rid) for rid in RIDS] == ["decoding"] * 4

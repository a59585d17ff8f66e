"""What the router core believes to be in the prefix caches of its workers, and what corrects it."""

from __future__ import annotations

import pytest

from router.core.fleet.prefix_index import BLOCK_TOKENS, Found, block_names
from shared.wire.messages import Joined, Prefilled
from tests.unit.router.deployment import ScriptedDeployment, baton, request

PROMPT = tuple(range(4 * BLOCK_TOKENS + 5))
BLOCKS = 4
NAMES = block_names(PROMPT, "")


def serve(
    world: ScriptedDeployment,
    rid: str,
    cached_tokens: int,
    output: tuple[int, ...] = (7, 8),
    cached_at_decode: int = 0,
) -> None:
    """A whole request; its workers say how much of the prompt they had in their caches."""
    world.submit(request(rid, PROMPT, len(output)))
    pages = baton(rid, 1, len(PROMPT))
    world.say("p0", Prefilled(rid, 1, 0, output[:1], pages, cached_tokens=cached_tokens))
    world.say("d0", Joined(rid, 1, 64, cached_at_decode, 0.01))
    world.generated("d0", rid, 1, *output[1:])
    world.finished("d0", rid, len(output))


def test_what_is_found_of_prompts_that_are_computed_and_of_fetched_ones_is_learnt_apart() -> None:
    world = ScriptedDeployment()
    serve(world, "r", BLOCK_TOKENS, cached_at_decode=2 * BLOCK_TOKENS)
    assert world.core.counters.placements["decode", "own"] == 1
    prefixes = world.core.fleet.prefixes
    assert prefixes.found("m", "decode") == Found()
    assert prefixes.found("m", "prefill") != Found()
    found = prefixes.found("m", "fetched").prompts
    assert found > 0.0, "another router had sent it there"
    serve(world, "s", BLOCK_TOKENS, cached_at_decode=2 * BLOCK_TOKENS)
    assert prefixes.found("m", "fetched").prompts == found, "this router had sent that itself"


def test_a_worker_whose_policy_asks_for_no_hits_is_not_indexed() -> None:
    world = ScriptedDeployment(decode_policy="total_tokens")
    serve(world, "r", 0)
    assert world.core.fleet.prefixes.hits(NAMES).all() == {"p0": BLOCKS * BLOCK_TOKENS}


def test_under_cache_aware_decode_prompt_and_output_are_indexed_but_for_the_last_token() -> None:
    output = tuple(range(2 * BLOCK_TOKENS - 5))
    world = ScriptedDeployment(decode_policy="cache_aware")
    serve(world, "r", 0, output)
    hits = world.core.fleet.prefixes.hits(block_names(PROMPT + output, "")).all()
    assert hits == {"p0": BLOCKS * BLOCK_TOKENS, "d0": (BLOCKS + 1) * BLOCK_TOKENS}


@pytest.mark.parametrize("policy", ["cache_aware", "round_robin"])
def test_a_lost_worker_leaves_the_index(policy: str) -> None:
    world = ScriptedDeployment(prefill_policy=policy, decode_policy="cache_aware")
    serve(world, "r", 0)
    world.down("p0")
    world.down("d0")
    assert len(world.core.fleet.prefixes) == 0


def test_an_answer_with_less_from_the_cache_than_expected_makes_the_router_forget_the_oldest() -> None:
    world = ScriptedDeployment(decode_policy="total_tokens")
    old = block_names(tuple(range(1000, 1000 + 4 * BLOCK_TOKENS)), "")
    world.core.fleet.prefixes.insert("p0", old)
    serve(world, "r0", 0)
    assert world.core.fleet.prefixes.hits(old).all() == {"p0": len(old) * BLOCK_TOKENS}, (
        "nothing was expected"
    )
    serve(world, "r1", BLOCK_TOKENS)
    hits = world.core.fleet.prefixes.hits(old).all()
    assert hits == {"p0": BLOCK_TOKENS}, "three blocks had been evicted, unlike what was expected"
    assert world.core.fleet.prefixes.hits(NAMES).all() == {"p0": BLOCKS * BLOCK_TOKENS}


def test_a_decode_worker_that_had_less_in_its_cache_than_expected_is_believed_to_have_lost_its_oldest() -> (
    None
):
    world = ScriptedDeployment()
    old = block_names(tuple(range(1000, 1000 + 4 * BLOCK_TOKENS)), "")
    world.core.fleet.prefixes.insert("d0", old)
    world.core.fleet.prefixes.insert("d0", NAMES)
    serve(world, "r", BLOCKS * BLOCK_TOKENS)
    assert "d0" not in world.core.fleet.prefixes.hits(old).all(), "it had nothing of the prompt, either"
    assert world.core.fleet.prefixes.hits(NAMES).all()["d0"] == BLOCKS * BLOCK_TOKENS

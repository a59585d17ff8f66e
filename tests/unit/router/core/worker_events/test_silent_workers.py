"""A worker that takes requests and answers none is found by comparison with others; a slow, busy or lone one is not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from router.core.worker_events.silent_workers import ANSWERS_MAX, REQUESTS_MAX
from shared.wire.grammar import Grammar
from shared.wire.messages import Cancel, Decode, Draining, Prefill
from shared.wire.sampling_params import SamplingParams
from tests.unit.router.deployment import LIMITS, ScriptedDeployment, request

SECONDS = 20.0
LOOK = SECONDS / 4
PROMPT = tuple(range(1, 65))


def fleet(prefill: int = 2, decode: int = 1) -> ScriptedDeployment:
    return ScriptedDeployment(prefill, decode, silent_seconds=SECONDS)


def silent(world: ScriptedDeployment) -> int:
    return world.core.counters.silent_workers.total()


def answered_by_others(world: ScriptedDeployment, silent: str, count: int, tokens: int = 80) -> None:
    """Requests come until `count` have gone to others than `silent`; these get their first token and end with it."""
    first = len(world.sent(Prefill))
    while count:
        rid = f"later-{first}"
        first += 1
        world.submit(request(rid, tuple(range(first, first + tokens)), max_new_tokens=1))
        peer = world.placed(Prefill, rid)
        if peer == silent:
            world.cancel(rid)
        elif peer is not None:
            world.prefilled(peer, rid, 7, finish="length")
            count -= 1


def swallowed(world: ScriptedDeployment) -> str:
    """The worker that has `r`, and says nothing of it."""
    world.submit(request("r", PROMPT))
    peer = world.placed(Prefill, "r")
    assert peer is not None
    return peer


def test_a_worker_that_answers_nothing_while_others_do_loses_all_that_it_has() -> None:
    world = fleet()
    peer = swallowed(world)
    world.wait(1.0)
    answered_by_others(world, peer, 3)
    world.wait(SECONDS - 1.1)
    assert world.placed(Prefill, "r") == peer
    world.wait(0.2)
    assert silent(world) == 1
    assert world.placed(Prefill, "r") not in (peer, None)
    assert world.sent(Cancel, "r") == [(peer, Cancel("r", 1))]
    assert world.core.counters.continuations["silent"] == 1
    (note,) = world.notes("fleet.worker_silent")
    assert (note.fields["worker"], note.fields["requests"]) == (peer, 1)


def test_the_same_for_a_decode_worker_by_the_rows_of_others() -> None:
    world = fleet(1, 2)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    peer = world.placed(Decode, "r")
    world.wait(1.0)
    for number in range(8):
        rid = f"later-{number}"
        world.submit(request(rid, max_new_tokens=2))
        world.prefilled("p0", rid, 10)
        other = world.placed(Decode, rid)
        assert other is not None
        if other == peer:
            world.cancel(rid)
        else:
            world.joined(other, rid)
            world.generated(other, rid, 1, 11)
            world.finished(other, rid, 2)
    world.wait(SECONDS)
    assert silent(world) == 1
    assert world.core.counters.silent_workers["decode"] == 1
    assert world.state("r") == "prefilling"
    assert world.output("r") == [10]


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_fewer_than_three_answers_prove_nothing(answers: int) -> None:
    world = fleet()
    peer = swallowed(world)
    world.wait(1.0)
    answered_by_others(world, peer, answers)
    world.wait(10 * SECONDS)
    assert silent(world) == 0
    answered_by_others(world, peer, 3 - answers)
    world.wait(LOOK)
    assert silent(world) == 1, "found at the next look"


def test_answers_to_what_was_sent_before_prove_nothing() -> None:
    world = fleet()
    answered_by_others(world, "p0", 10)
    world.wait(1.0)
    swallowed(world)
    world.wait(10 * SECONDS)
    assert silent(world) == 0


def test_answers_to_shorter_prompts_prove_nothing() -> None:
    world = fleet()
    peer = swallowed(world)
    world.wait(1.0)
    answered_by_others(world, peer, 10, tokens=8)
    world.wait(10 * SECONDS)
    assert silent(world) == 0


def test_what_others_have_computed_counts_and_not_what_was_expected_to_be_cached() -> None:
    world = fleet()
    peer = swallowed(world)
    world.wait(1.0)
    other = "p0" if peer == "p1" else "p1"
    rids = [f"later-{number}" for number in range(6)]
    for rid in rids:  # all but one of them expect it in the cache of the worker that was chosen for the first
        world.submit(request(rid, tuple(range(100, 292)), max_new_tokens=1))
    theirs = [rid for rid in rids if world.placed(Prefill, rid) == other]
    assert len(theirs) >= 3
    for rid in theirs:
        world.prefilled(other, rid, 7, finish="length")  # two tokens were cached
    world.wait(SECONDS)
    assert silent(world) == 1


def test_a_long_prompt_hides_no_worker_that_answers_shorter_ones_neither() -> None:
    world = ScriptedDeployment(2, 1, silent_seconds=SECONDS, prefill_policy="round_robin")
    world.submit(request("long", tuple(range(1, 2001))))
    peer = world.placed(Prefill, "long")
    assert peer is not None
    for rid in ("other", "r"):
        world.submit(request(rid, PROMPT))
    assert world.placed(Prefill, "r") == peer
    world.wait(1.0)
    answered_by_others(world, peer, 3)
    world.wait(SECONDS)
    assert silent(world) == 1
    assert peer not in (world.placed(Prefill, "long"), world.placed(Prefill, "r"))


def test_what_is_remembered_of_answers_is_bounded() -> None:
    world = fleet()
    answered_by_others(world, "p0", 1000)
    answers = world.core._silent_workers._answers
    assert {role: len(answers[role]) for role in answers} == {"prefill": ANSWERS_MAX, "decode": 0}


def test_a_worker_is_compared_by_few_requests() -> None:
    """Those behind `REQUESTS_MAX` longer ones convict nobody: one look costs no more than so many comparisons."""
    limits = replace(LIMITS, slots=64)
    world = ScriptedDeployment(2, 1, limits=limits, silent_seconds=SECONDS, prefill_policy="round_robin")
    for number in range(2 * REQUESTS_MAX):
        world.submit(request(f"long-{number}", tuple(range(1, 1001))))
    peer = swallowed(world)
    known = world.core.fleet.workers[peer]
    assert len(known.assigned) == REQUESTS_MAX + 1
    world.wait(1.0)
    answered_by_others(world, peer, 3)
    world.wait(10 * SECONDS)
    assert silent(world) == 0
    world.cancel(next(iter(known.assigned)))
    world.wait(LOOK)
    assert silent(world) == 1


def test_a_worker_alone_is_not_judged_by_its_own_answers() -> None:
    world = fleet(1, 1)
    swallowed(world)
    world.wait(1.0)
    for number in range(3):
        world.submit(request(f"other-{number}", PROMPT, max_new_tokens=1))
        world.prefilled("p0", f"other-{number}", 7, finish="length")
    world.wait(10 * SECONDS)
    assert silent(world) == 0


@pytest.mark.parametrize("load", [{"queued": 1, "queued_tokens": 64}, {"running": 1, "running_tokens": 64}])
def test_a_worker_that_reports_a_request_is_slow_and_not_silent(load: dict[str, int]) -> None:
    world = fleet()
    peer = swallowed(world)
    world.loaded(peer, **load)
    world.wait(1.0)
    answered_by_others(world, peer, 10)
    world.wait(10 * SECONDS)
    assert silent(world) == 0
    world.loaded(peer)
    world.wait(LOOK)
    assert silent(world) == 1


def test_a_request_whose_grammar_is_compiled_need_not_be_reported() -> None:
    world = fleet()
    for number in (2, 3):
        world.up("prefill", f"p{number}", features=("grammar",))
    world.down("p0")
    world.down("p1")
    params = SamplingParams(max_new_tokens=8, seed=0, grammar=Grammar("json", "{}"))
    world.up("decode", "d1", features=("grammar",))
    world.submit(request("r", PROMPT, params=params))
    peer = world.placed(Prefill, "r")
    assert peer is not None
    world.wait(1.0)
    answered_by_others(world, peer, 10)
    world.wait(10 * SECONDS)
    assert silent(world) == 0


def test_every_word_about_a_request_that_it_has_gives_a_worker_time_again() -> None:
    world = fleet()
    peer = swallowed(world)
    world.wait(1.0)
    answered_by_others(world, peer, 3)
    held = [f"held-{number}" for number in range(8)]
    for rid in held:
        world.submit(request(rid, PROMPT))
    spoken_of = next(rid for rid in held if world.placed(Prefill, rid) == peer)
    world.wait(SECONDS - 2.0)
    world.prefilled(peer, spoken_of, 7)
    world.wait(SECONDS - 0.1)
    assert silent(world) == 0
    world.wait(LOOK)
    assert silent(world) == 1


def test_a_worker_found_silent_rests_and_then_gets_one_request_at_a_time_until_it_speaks() -> None:
    world = fleet()
    peer = swallowed(world)
    world.wait(1.0)
    answered_by_others(world, peer, 3)
    world.wait(SECONDS - 1.0)
    assert silent(world) == 1
    assert world.placed(Prefill, "r") != peer
    known = world.core.fleet.workers[peer]
    for number in range(2 * known.prefilling_max):
        world.submit(request(f"more-{number}", PROMPT))
    assert not known.assigned
    world.wait(SECONDS)
    assert len(known.assigned) == 1
    (rid,) = known.assigned
    world.prefilled(peer, rid, 7)
    assert len(known.assigned) > 1


def test_a_silent_worker_that_ends_or_drains_leaves_nothing_behind() -> None:
    world = fleet()
    peer = swallowed(world)
    world.wait(1.0)
    answered_by_others(world, peer, 3)
    world.say(peer, Draining())
    world.wait(SECONDS)
    assert silent(world) == 1
    world.down(peer)
    world.cancel("r")
    world.wait(3 * SECONDS)
    assert world.core.next_deadline() is None
    world.assert_nothing_left()

"""What the router core does when workers are lost, pages go stale or messages cannot be believed: no token is lost."""

from __future__ import annotations

from collections import Counter

from router.core.effects import RequestCompleted, RequestFailed, Usage
from router.core.requests.live_request import FORGIVING_TOKENS
from shared.links.events import Received
from shared.wire.messages import Cancel, Decode, Draining, Prefill, Prefilled, Release
from tests.unit.router.deployment import ScriptedDeployment, baton, decoding, request

LOSS_SECONDS = 1.0


def test_a_lost_decode_pod_only_pauses_the_stream() -> None:
    world = decoding()
    world.down("d0")
    peer, again = world.sent(Prefill)[-1]
    assert (again.attempt, again.token_ids, again.prompt_len) == (2, (1, 2, 3, 10, 11), 3)
    world.prefilled(peer, "r", 12, attempt=2, index=2)
    assert world.placed(Decode, "r") == "d1"
    world.generated("d1", "r", 3, 13, attempt=2)
    assert world.output("r") == [10, 11, 12, 13]
    assert world.core.counters.continuations == Counter(lost_decode=1)


def test_with_one_decode_pod_a_broken_stream_waits_for_its_return() -> None:
    world = ScriptedDeployment(waiting_seconds_max=5.0, worker_return_seconds=60.0)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.down("d0")
    world.wait(50)
    assert world.outcome("r") is None
    world.up("decode", "d0 again")
    world.prefilled("p0", "r", 11, attempt=2, index=1)
    assert world.placed(Decode, "r") == "d0 again"


def test_a_broken_stream_ends_with_503_if_no_equal_worker_returns() -> None:
    world = ScriptedDeployment(worker_return_seconds=60.0)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.down("d0")
    world.up("decode", "other", model="other weights")
    world.wait(61)
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert (outcome.status, outcome.retry_after_seconds) == (503, 1.0)
    world.assert_nothing_left()


def test_a_stream_continues_on_no_other_model_even_under_the_same_name() -> None:
    world = ScriptedDeployment()
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.down("p0")
    world.up("prefill", "p1", model="other")
    world.up("decode", "d1", model="other")
    assert world.state("r") == "decoding"
    world.down("d0")
    assert world.state("r") == "waiting"
    assert len(world.sent(Prefill)) == 1


def test_a_lost_prefill_pod_means_another_attempt_elsewhere() -> None:
    world = ScriptedDeployment(2, 1)
    world.submit(request("r"))
    world.down("p0")
    assert [(peer, sent.attempt) for peer, sent in world.sent(Prefill)] == [("p0", 1), ("p1", 2)]


def test_a_decoding_request_does_not_feel_the_loss_of_its_prefill_pod() -> None:
    world = ScriptedDeployment(2, 1)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.down("p0")
    world.joined("d0", "r")
    assert world.state("r") == "decoding"
    assert not world.sent(Release)


def test_no_room_after_the_prefill_pod_was_lost_means_a_new_attempt() -> None:
    world = ScriptedDeployment(2, 1)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.down("p0")
    world.refused("d0", "r", "no_room")
    assert [(peer, sent.attempt) for peer, sent in world.sent(Prefill)] == [("p0", 1), ("p1", 2)]


def test_a_request_that_kills_at_once_whatever_takes_it_cannot_kill_all() -> None:
    world = ScriptedDeployment(9, 1, losses_max=3, loss_seconds=LOSS_SECONDS)
    world.submit(request("r"))
    while world.outcome("r") is None:
        if world.state("r") == "prefilling":
            world.down(world.sent(Prefill)[-1][0])
        else:
            world.wait(LOSS_SECONDS / 4)
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert (outcome.status, outcome.code) == (500, "attempts_exhausted")
    assert len(world.core.fleet.of_role("prefill")) == 9 - 5


def stream_that_loses(tokens: int, losses: int) -> ScriptedDeployment:
    """A stream whose workers die one after the other, each when it has had so many tokens there."""
    world = ScriptedDeployment(1, losses + 1, losses_max=2, loss_seconds=LOSS_SECONDS)
    world.submit(request("r", max_new_tokens=1_000))
    for attempt in range(1, losses + 1):
        index = (attempt - 1) * tokens
        world.prefilled("p0", "r", 10, attempt=attempt, index=index)
        decode = world.placed(Decode, "r") or "nowhere"
        world.generated(decode, "r", index + 1, *range(tokens - 1), attempt=attempt)
        world.wait(LOSS_SECONDS)
        world.down(decode)
    return world


def test_a_long_stream_outlives_any_number_of_workers() -> None:
    world = stream_that_loses(FORGIVING_TOKENS, 8)
    assert world.outcome("r") is None
    assert len(world.output("r")) == 8 * FORGIVING_TOKENS
    assert world.core.counters.continuations == Counter(lost_decode=8)


def test_a_stream_that_comes_no_further_ends_with_its_losses() -> None:
    outcome = stream_that_loses(FORGIVING_TOKENS - 1, 2).outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert outcome.code == "attempts_exhausted"


def test_a_request_that_rests_holds_nobody_up() -> None:
    world = ScriptedDeployment(3, 1, loss_seconds=LOSS_SECONDS)
    world.submit(request("r"))
    for _ in range(2):
        world.down(world.sent(Prefill)[-1][0])
    world.submit(request("other"))
    assert world.state("r") == "waiting"
    assert world.state("other") == "prefilling"
    world.cancel("r")
    world.cancel("other")
    world.assert_nothing_left()


def test_a_lost_request_that_has_all_its_tokens_is_finished() -> None:
    world = ScriptedDeployment()
    world.submit(request("r", max_new_tokens=2))
    world.prefilled("p0", "r", 10)
    world.generated("d0", "r", 1, 11)
    world.down("d0")
    assert world.outcome("r") == RequestCompleted("length", Usage(3, 2, 2))


def test_a_stream_cut_right_behind_its_end_of_sequence_is_finished() -> None:
    world = ScriptedDeployment()
    world.submit(request("r", eos_token_ids=frozenset({99})))
    world.prefilled("p0", "r", 10)
    world.generated("d0", "r", 1, 99)
    world.down("d0")
    assert world.outcome("r") == RequestCompleted("stop", Usage(3, 2, 2))


def test_pages_whose_lease_has_ended_mean_a_new_attempt_on_another_decode_pod() -> None:
    world = ScriptedDeployment(1, 2)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.refused("d0", "r", "stale")
    assert world.sent(Cancel) == [("p0", Cancel("r", 1))]
    world.prefilled("p0", "r", 11, attempt=2, index=1)
    assert world.placed(Decode, "r") == "d1"
    assert +world.core.counters.stale_batons == {"stale": 1}


def test_a_retracted_request_without_pages_is_recomputed_and_counts_no_loss() -> None:
    world = ScriptedDeployment(losses_max=1)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.generated("d0", "r", 1, 11)
    world.refused("d0", "r", "stale")
    assert world.sent(Prefill)[-1][1].token_ids == (1, 2, 3, 10, 11)
    assert world.core.counters.continuations == Counter(retracted=1)


def test_a_request_sent_back_before_its_first_decode_step_counts_no_loss_either() -> None:
    world = ScriptedDeployment(losses_max=1)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.joined("d0", "r")
    world.refused("d0", "r", "stale")
    assert world.sent(Prefill)[-1][1].token_ids == (1, 2, 3, 10)
    assert world.core.counters.continuations == Counter(retracted=1)


def test_a_lease_that_ended_while_the_request_was_ready_means_a_new_attempt() -> None:
    world = ScriptedDeployment()
    world.loaded("d0", slots_free=0)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.refused("p0", "r", "stale")
    assert world.sent(Prefill)[-1][1].attempt == 2
    assert not world.sent(Cancel)


def test_pages_that_went_stale_while_their_request_waited_for_room_are_no_loss() -> None:
    world = ScriptedDeployment(losses_max=2, ready_seconds=2.0)
    world.submit(request("r"))
    for attempt in range(1, 6):
        world.prefilled("p0", "r", 10, attempt=attempt, index=attempt - 1)
        world.wait(2.5)
        world.refused("d0", "r", "stale", attempt=attempt)
    assert world.outcome("r") is None


def test_a_worker_that_calls_all_pages_stale_does_not_have_a_prompt_computed_for_ever() -> None:
    world = ScriptedDeployment(losses_max=3, ready_seconds=2.0)
    world.submit(request("r"))
    for attempt in range(1, 4):
        world.prefilled("p0", "r", 10, attempt=attempt, index=attempt - 1)
        world.wait(LOSS_SECONDS)
        world.refused("d0", "r", "stale", attempt=attempt)
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert outcome.code == "attempts_exhausted"


def test_a_repeat_is_dropped_and_an_overlap_gives_only_what_is_new() -> None:
    world = decoding()
    world.generated("d0", "r", 1, 11)
    world.generated("d0", "r", 1, 11, 12)
    assert world.output("r") == [10, 11, 12]
    assert world.core.counters.dropped_messages == {"repeat": 1}


def test_a_gap_is_a_loss_of_that_worker_for_that_attempt() -> None:
    world = decoding()
    world.generated("d0", "r", 3, 13)
    assert ("d0", Cancel("r", 1)) in world.sent(Cancel)
    assert world.sent(Prefill)[-1][1].attempt == 2
    assert world.output("r") == [10, 11]


def test_a_finish_that_counts_more_tokens_than_came_is_a_gap() -> None:
    world = decoding()
    world.finished("d0", "r", 5)
    assert world.outcome("r") is None
    assert world.core.counters.continuations == Counter(gap=1)


def test_messages_of_older_attempts_are_dropped_and_counted() -> None:
    world = decoding()
    world.generated("d0", "r", 3, 13)
    world.generated("d0", "r", 2, 12)
    world.finished("d0", "r", 3)
    assert world.output("r") == [10, 11]
    assert world.core.counters.dropped_messages == {"old_attempt": 2}


def test_messages_nobody_waits_for_are_dropped_not_believed() -> None:
    world = decoding()
    world.generated("d1", "r", 2, 66)
    world.prefilled("p0", "r", 66, index=2)
    world.prefilled("d0", "r", 66, index=2)
    world.finished("d0", "who", 3)
    world.link(Received("stranger", Prefilled("r", 1, 2, (66,), None)))
    assert world.output("r") == [10, 11]
    dropped = world.core.counters.dropped_messages
    assert dropped == {"other_worker": 2, "unexpected": 1, "ended": 1, "unknown_worker": 1}


def test_a_new_session_of_the_same_worker_is_the_loss_of_the_old_one() -> None:
    world = decoding()
    world.up("decode", "d0")
    assert world.core.counters.continuations == Counter(lost_decode=1)
    assert not world.core.fleet.workers["d0"].assigned


def test_a_first_token_without_baton_or_end_is_a_loss() -> None:
    world = ScriptedDeployment()
    world.submit(request("r"))
    world.say("p0", Prefilled("r", 1, 0, (10,), None))
    assert world.sent(Prefill)[-1][1].token_ids == (1, 2, 3, 10)


def test_a_first_token_out_of_place_is_a_gap() -> None:
    world = ScriptedDeployment(2, 1)
    world.submit(request("r"))
    world.say("p0", Prefilled("r", 1, 4, (10,), baton("r", 1, 3)))
    assert world.output("r") == []
    assert world.core.counters.continuations == Counter(gap=1)
    assert world.sent(Cancel) == [("p0", Cancel("r", 1))]


def test_a_migrating_stream_that_ends_only_for_the_router_is_finished_when_the_holder_of_its_pages_is_lost() -> (
    None
):
    """Router and worker read the end tokens apart and may disagree: that must end the request, not the router."""
    world = ScriptedDeployment(1, 2)
    world.submit(request("r", eos_token_ids=frozenset({99})))
    world.prefilled("p0", "r", 10)
    world.joined("d0", "r")
    world.say("d0", Draining())
    world.generated("d0", "r", 1, 99)
    world.loaded("d1", slots_free=0)
    world.migrating("d0", "r", 2)
    assert world.state("r") == "ready"
    world.down("d0")
    assert world.outcome("r") == RequestCompleted("stop", Usage(3, 2, 2))
    world.assert_nothing_left()


def test_the_end_tokens_that_the_worker_names_count_not_those_of_the_tokenizer() -> None:
    world = ScriptedDeployment(1, 0)
    world.up("decode", "d0", eos_token_ids=(98,))
    for rid, last in (("goes on", 99), ("ends", 98)):
        world.submit(request(rid, eos_token_ids=frozenset({99})))
        world.prefilled("p0", rid, 10)
        world.generated("d0", rid, 1, last)
    world.down("d0")
    assert world.state("goes on") == "waiting"
    assert world.outcome("ends") == RequestCompleted("stop", Usage(3, 2, 2))


def test_a_request_that_a_live_worker_is_silent_about_is_cancelled_there_and_tried_again() -> None:
    world = decoding(stall_seconds=20.0)
    for _ in range(4):
        world.wait(5.0)
        world.loaded("d0")
    assert world.state("r") == "prefilling"
    assert world.sent(Cancel) == [("d0", Cancel("r", 1))]
    assert world.sent(Prefill)[-1][1].token_ids == (1, 2, 3, 10, 11)
    assert world.core.counters.continuations["stalled"] == 1
    (note,) = world.notes("request.stalled")
    assert (note.fields["worker"], note.fields["state"]) == ("d0", "decoding")


def test_a_request_that_its_prefill_worker_has_forgotten_goes_elsewhere() -> None:
    world = ScriptedDeployment(2, 1, stall_seconds=20.0)
    world.submit(request("r"))
    world.wait(20.0)
    assert world.sent(Cancel) == [("p0", Cancel("r", 1))]
    assert world.placed(Prefill, "r") == "p1"


def test_every_row_gives_its_request_time_again() -> None:
    world = decoding(stall_seconds=20.0)
    for index in range(2, 6):
        world.wait(15.0)
        world.generated("d0", "r", index, index)
    world.wait(19.9)
    assert not world.sent(Cancel)
    world.wait(0.2)
    assert world.sent(Cancel)

"""What the router core does with requests, workers and time: one claim a test."""

from __future__ import annotations

import pytest

from router.effects import Aborted, Completed, Ended, Failed, Send, Tokens, Usage
from shared.link_events import Received
from shared.messages import Cancel, Decode, Limits, Prefill, Prefilled, Release, Renew
from tests.unit.router.deployment import LIMITS, Deployment, baton, request


def decoding(**settings: float) -> Deployment:
    """One request, two workers a role, two tokens delivered by p0 and d0."""
    world = Deployment(2, 2, limits=LIMITS, **settings)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.joined("d0", "r")
    world.generated("d0", "r", 1, 11)
    assert world.output("r") == [10, 11]
    return world


def test_a_request_passes_prefill_and_decode_and_ends_with_its_usage() -> None:
    world = Deployment()
    world.submit(request("r", max_new_tokens=3))
    (send,) = world.news()
    assert isinstance(send, Send)
    assert isinstance(send.message, Prefill)
    assert (send.peer, send.message.token_ids, send.message.prompt_len) == ("p0", (1, 2, 3), 3)
    world.prefilled("p0", "r", 10)
    first, decode = world.news()
    assert first == Tokens("r", 0, (10,))
    assert isinstance(decode, Send)
    assert isinstance(decode.message, Decode)
    assert decode.message.token_ids == (1, 2, 3, 10)
    assert decode.message.baton.kv_len == len(decode.message.token_ids) - 1
    world.joined("d0", "r")
    assert world.news() == [Send("p0", Release("r", 1))]
    world.generated("d0", "r", 1, 11, 12)
    world.finished("d0", "r", 3)
    assert world.news() == [Tokens("r", 1, (11, 12)), Ended("r", Completed("length", Usage(3, 3, 2)))]
    world.assert_nothing_left()
    assert world.core.counters.requests == {"length": 1}
    assert world.core.next_deadline() is None


def test_the_first_tokens_release_the_lease_if_nothing_was_said_of_joining() -> None:
    world = Deployment()
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.generated("d0", "r", 1, 11)
    assert world.sent(Release) == [("p0", Release("r", 1))]
    world.joined("d0", "r")
    assert len(world.sent(Release)) == 1


def test_a_request_that_ends_with_its_first_token_never_sees_decode() -> None:
    world = Deployment(1, 0)
    world.submit(request("r", max_new_tokens=1))
    world.prefilled("p0", "r", 10, finish="length")
    assert world.outcome("r") == Completed("length", Usage(3, 1, 2))
    world.assert_nothing_left()


def test_a_lost_decode_pod_only_pauses_the_stream() -> None:
    world = decoding()
    world.down("d0")
    peer, again = world.sent(Prefill)[-1]
    assert (again.attempt, again.token_ids, again.prompt_len) == (2, (1, 2, 3, 10, 11), 3)
    world.prefilled(peer, "r", 12, attempt=2, index=2)
    assert world.placed(Decode, "r") == "d1"
    world.generated("d1", "r", 3, 13, attempt=2)
    assert world.output("r") == [10, 11, 12, 13]
    assert world.core.counters.continuations == {"lost_decode": 1}


def test_with_one_decode_pod_a_broken_stream_waits_for_its_return() -> None:
    world = Deployment(waiting_seconds_max=5.0, worker_return_seconds=60.0)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.down("d0")
    world.wait(50)
    assert world.outcome("r") is None
    world.up("decode", "d0 again")
    world.prefilled("p0", "r", 11, attempt=2, index=1)
    assert world.placed(Decode, "r") == "d0 again"


def test_a_broken_stream_ends_with_503_if_no_equal_worker_returns() -> None:
    world = Deployment(worker_return_seconds=60.0)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.down("d0")
    world.up("decode", "other", model="other weights")
    world.wait(61)
    outcome = world.outcome("r")
    assert isinstance(outcome, Failed)
    assert (outcome.status, outcome.retry_after_seconds) == (503, 1.0)
    world.assert_nothing_left()


def test_a_stream_continues_on_no_other_model_even_under_the_same_name() -> None:
    world = Deployment()
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
    world = Deployment(2, 1)
    world.submit(request("r"))
    world.down("p0")
    assert [(peer, sent.attempt) for peer, sent in world.sent(Prefill)] == [("p0", 1), ("p1", 2)]


def test_a_ready_request_depends_on_the_prefill_pod_that_holds_its_pages() -> None:
    world = Deployment(1, 1)
    world.loaded("d0", slots_free=0)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    assert world.state("r") == "ready"
    world.down("p0")
    assert world.state("r") == "waiting"


def test_a_decoding_request_does_not_feel_the_loss_of_its_prefill_pod() -> None:
    world = Deployment(2, 1)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.down("p0")
    world.joined("d0", "r")
    assert world.state("r") == "decoding"
    assert not world.sent(Release)


def test_no_room_after_the_prefill_pod_was_lost_means_a_new_attempt() -> None:
    world = Deployment(2, 1)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.down("p0")
    world.refused("d0", "r", "no_room")
    assert [(peer, sent.attempt) for peer, sent in world.sent(Prefill)] == [("p0", 1), ("p1", 2)]


def test_a_request_that_kills_its_workers_ends_after_losses_max() -> None:
    world = Deployment(4, 1, losses_max=3)
    world.submit(request("r"))
    for _ in range(3):
        peer = world.placed(Prefill, "r")
        assert peer is not None
        world.down(peer)
    outcome = world.outcome("r")
    assert isinstance(outcome, Failed)
    assert outcome.status == 500
    assert len(world.core.fleet.role("prefill")) == 1


def test_a_lost_request_that_has_all_its_tokens_is_finished() -> None:
    world = Deployment()
    world.submit(request("r", max_new_tokens=2))
    world.prefilled("p0", "r", 10)
    world.generated("d0", "r", 1, 11)
    world.down("d0")
    assert world.outcome("r") == Completed("length", Usage(3, 2, 2))


def test_a_stream_cut_right_behind_its_end_of_sequence_is_finished() -> None:
    world = Deployment()
    world.submit(request("r", eos_token_ids=frozenset({99})))
    world.prefilled("p0", "r", 10)
    world.generated("d0", "r", 1, 99)
    world.down("d0")
    assert world.outcome("r") == Completed("stop", Usage(3, 2, 2))


def test_no_room_costs_no_attempt_and_goes_elsewhere() -> None:
    world = Deployment(1, 2)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.refused("d0", "r", "no_room")
    assert [(peer, sent.attempt) for peer, sent in world.sent(Decode)] == [("d0", 1), ("d1", 1)]


def test_a_worker_without_room_is_asked_again_after_a_pause_not_at_once() -> None:
    world = Deployment(no_room_seconds=0.1)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.refused("d0", "r", "no_room")
    world.loaded("d0")
    assert len(world.sent(Decode)) == 1
    world.wait(0.11)
    assert len(world.sent(Decode)) == 2


def test_refusals_for_lack_of_room_do_not_prolong_the_deadline() -> None:
    world = Deployment(ready_seconds_max=2.0, no_room_seconds=0.5)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    for _ in range(8):
        if world.outcome("r") is None:
            world.refused("d0", "r", "no_room")
            world.wait(0.5)
    outcome = world.outcome("r")
    assert isinstance(outcome, Failed)
    assert outcome.status == 503


@pytest.mark.parametrize("reason", ["stale", "unreachable"])
def test_pages_that_cannot_be_fetched_mean_a_new_attempt_on_another_decode_pod(reason: str) -> None:
    world = Deployment(1, 2)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.refused("d0", "r", reason)  # type: ignore[arg-type]
    assert world.sent(Cancel) == [("p0", Cancel("r", 1))]
    world.prefilled("p0", "r", 11, attempt=2, index=1)
    assert world.placed(Decode, "r") == "d1"
    assert world.core.counters.stale_batons == {reason: 1}


def test_a_retracted_request_without_pages_is_recomputed_and_counts_no_loss() -> None:
    world = Deployment(losses_max=1)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.generated("d0", "r", 1, 11)
    world.refused("d0", "r", "stale")
    assert world.sent(Prefill)[-1][1].token_ids == (1, 2, 3, 10, 11)
    assert world.core.counters.continuations == {"retracted": 1}


def test_a_lease_that_ended_while_the_request_was_ready_means_a_new_attempt() -> None:
    world = Deployment()
    world.loaded("d0", slots_free=0)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.refused("p0", "r", "stale")
    assert world.sent(Prefill)[-1][1].attempt == 2
    assert not world.sent(Cancel)


def test_the_lease_is_renewed_while_ready_and_until_the_pages_have_arrived() -> None:
    world = Deployment(renew_seconds=1.0)
    world.loaded("d0", slots_free=0)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.wait(2.5)
    world.loaded("d0")
    assert world.state("r") == "decoding"
    world.wait(2.0)
    assert world.sent(Renew) == [("p0", Renew("r", 1))] * 4
    world.joined("d0", "r")
    world.wait(5.0)
    assert len(world.sent(Renew)) == 4


def test_a_ready_request_without_a_decode_worker_ends_with_503_and_its_lease_too() -> None:
    world = Deployment(ready_seconds_max=3.0)
    world.loaded("d0", slots_free=0)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.wait(3.0)
    outcome = world.outcome("r")
    assert isinstance(outcome, Failed)
    assert outcome.status == 503
    assert world.sent(Cancel) == [("p0", Cancel("r", 1))]
    world.assert_nothing_left()


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
    assert world.core.counters.continuations == {"gap": 1}


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
    world.core.link(Received("stranger", Prefilled("r", 1, 2, (66,), None)), world.now)
    assert world.output("r") == [10, 11]
    dropped = world.core.counters.dropped_messages
    assert dropped == {"other_worker": 2, "unexpected": 1, "ended": 1, "unknown_worker": 1}


def test_a_client_that_goes_leaves_nothing_behind_in_any_state() -> None:
    stages = ["waiting", "prefilling", "ready", "decoding"]
    world = Deployment(0, 1)
    world.submit(request("waiting"))
    world.cancel("waiting")
    world.up("prefill", "p0")
    world.submit(request("prefilling"))
    world.cancel("prefilling")
    world.submit(request("decoding"))
    world.prefilled("p0", "decoding", 10)
    world.cancel("decoding")
    world.loaded("d0", slots_free=0)
    world.submit(request("ready"))
    world.prefilled("p0", "ready", 10)
    world.cancel("ready")
    world.cancel("nobody")
    assert [world.outcome(rid) for rid in stages] == [Aborted()] * 4
    assert sorted((peer, message.rid) for peer, message in world.sent(Cancel)) == [
        ("d0", "decoding"),
        ("p0", "decoding"),
        ("p0", "prefilling"),
        ("p0", "ready"),
    ]
    world.assert_nothing_left()
    assert world.core.next_deadline() is None


def test_a_stop_string_completes_the_request_and_calls_the_worker_off() -> None:
    world = decoding()
    world.stop("r")
    world.generated("d0", "r", 2, 12)
    assert world.outcome("r") == Completed("stop", Usage(3, 2, 2))
    assert world.sent(Cancel) == [("d0", Cancel("r", 1))]
    assert world.output("r") == [10, 11]


def test_a_full_queue_is_a_429_that_says_when_to_come_again() -> None:
    world = Deployment(0, 0, queue_max=2)
    for rid in ("a", "b", "c"):
        world.submit(request(rid))
    assert (world.outcome("a"), world.outcome("b")) == (None, None)
    outcome = world.outcome("c")
    assert isinstance(outcome, Failed)
    assert (outcome.status, outcome.retry_after_seconds) == (429, 1.0)


def test_a_request_no_worker_takes_in_time_is_a_503() -> None:
    world = Deployment(0, 1, waiting_seconds_max=7.0)
    world.submit(request("r"))
    world.wait(6.9)
    assert world.outcome("r") is None
    world.wait(0.1)
    outcome = world.outcome("r")
    assert isinstance(outcome, Failed)
    assert outcome.status == 503


def test_a_request_past_its_time_limit_is_a_504_and_called_off() -> None:
    world = decoding(request_seconds_max=20.0)
    world.wait(20.0)
    outcome = world.outcome("r")
    assert isinstance(outcome, Failed)
    assert outcome.status == 504
    assert world.sent(Cancel) == [("d0", Cancel("r", 1))]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "unheard of"}, 404, "model"),
        ({"token_ids": ()}, 400, "prompt"),
        ({"token_ids": (1,) * 4090}, 400, None),
    ],
    ids=["unknown model", "empty prompt", "longer than the context"],
)
def test_what_no_worker_could_serve_is_refused_at_the_door(
    fields: dict[str, object], status: int, param: str | None
) -> None:
    world = Deployment()
    world.submit(request("r", **fields))  # type: ignore[arg-type]
    outcome = world.outcome("r")
    assert isinstance(outcome, Failed)
    assert (outcome.status, outcome.param) == (status, param)
    assert not world.sent(Prefill)


def test_a_request_that_fits_exactly_is_served() -> None:
    world = Deployment()
    world.submit(request("r", prompt=(1,) * 4088))
    assert world.sent(Prefill)


def test_a_worker_that_finds_it_too_long_ends_it_with_400() -> None:
    world = Deployment()
    world.submit(request("r"))
    world.refused("p0", "r", "too_long")
    outcome = world.outcome("r")
    assert isinstance(outcome, Failed)
    assert outcome.status == 400


def test_an_internal_error_of_a_worker_is_a_loss() -> None:
    world = Deployment(2, 1)
    world.submit(request("r"))
    world.refused("p0", "r", "internal")
    assert world.placed(Prefill, "r") == "p1"


def test_prefill_workers_are_not_flooded_and_the_first_come_goes_first() -> None:
    world = Deployment(1, 1, limits=Limits(4096, 16, 512, slots=1, vocab_size=10), prefilling_per_slot=2.0)
    for rid in "abcd":
        world.submit(request(rid))
    world.submit(request("urgent", priority=5))
    assert [message.rid for _, message in world.sent(Prefill)] == ["a", "b"]
    for rid in ("a", "b", "urgent"):
        world.prefilled("p0", rid, 10)
    assert [message.rid for _, message in world.sent(Prefill)] == ["a", "b", "urgent", "c", "d"]


def test_prefill_stops_while_ready_requests_tie_up_pages() -> None:
    world = Deployment(ready_max=2)
    world.loaded("d0", slots_free=0)
    for rid in "abc":
        world.submit(request(rid))
        if rid != "c":
            world.prefilled("p0", rid, 10)
    assert len(world.sent(Prefill)) == 2
    world.cancel("a")
    assert len(world.sent(Prefill)) == 3


def test_a_large_request_that_waits_for_room_is_not_overtaken() -> None:
    world = Deployment()
    world.loaded("d0", free_pages=3)
    world.submit(request("large", prompt=(1,) * 100))
    world.submit(request("small"))
    world.prefilled("p0", "large", 10)
    world.prefilled("p0", "small", 10)
    assert not world.sent(Decode)
    world.loaded("d0", free_pages=10)
    assert [message.rid for _, message in world.sent(Decode)] == ["large", "small"]


def test_a_stuck_model_does_not_hold_up_another() -> None:
    world = Deployment()
    world.up("prefill", "p1", model_name="n", model="n")
    world.up("decode", "d1", model_name="n", model="n")
    world.loaded("p0", accepting=False)
    world.submit(request("stuck"))
    world.submit(request("free", model="n"))
    assert world.placed(Prefill, "free") == "p1"
    assert world.placed(Prefill, "stuck") is None


def test_nothing_is_computed_that_no_decode_worker_could_take_over() -> None:
    world = Deployment(1, 0)
    world.submit(request("r"))
    assert not world.sent(Prefill)
    world.up("decode", "d0", kv_format="another layout")
    assert not world.sent(Prefill)
    world.up("decode", "d1")
    assert world.sent(Prefill)


def test_a_worker_of_another_protocol_is_not_used() -> None:
    world = Deployment(0, 1)
    world.up("prefill", "p0", protocol=99)
    world.submit(request("r"))
    assert not world.sent(Prefill)
    assert world.core.counters.workers_refused == {"protocol": 1}


def test_a_new_session_of_the_same_worker_is_the_loss_of_the_old_one() -> None:
    world = decoding()
    world.up("decode", "d0")
    assert world.core.counters.continuations == {"lost_decode": 1}
    assert not world.core.fleet.workers["d0"].assigned


def test_a_first_token_without_baton_or_end_is_a_loss() -> None:
    world = Deployment()
    world.submit(request("r"))
    world.say("p0", Prefilled("r", 1, 0, (10,), None))
    assert world.sent(Prefill)[-1][1].token_ids == (1, 2, 3, 10)


def test_a_first_token_out_of_place_is_a_gap() -> None:
    world = Deployment(2, 1)
    world.submit(request("r"))
    world.say("p0", Prefilled("r", 1, 4, (10,), baton("r", 1, 3)))
    assert world.output("r") == []
    assert world.core.counters.continuations == {"gap": 1}
    assert world.sent(Cancel) == [("p0", Cancel("r", 1))]


def test_debug_tells_where_a_request_was_and_why_but_no_token() -> None:
    world = decoding()
    world.wait(2.0)
    world.finished("d0", "r", 2)
    told = world.core.debug("r")
    assert told is not None
    pods = told["pods"]
    assert isinstance(pods, list)
    assert [(pod["role"], pod["worker"]) for pod in pods] == [("prefill", "p0"), ("decode", "d0")]
    assert all(pod["why"] for pod in pods)
    assert (told["fetched_bytes"], told["cached_tokens"], told["completion_tokens"]) == (64, 2, 2)
    assert told["stage_milliseconds"]["decoding"] == 2000.0  # type: ignore[index]
    assert "token_ids" not in str(told)
    assert world.core.debug("unknown") is None


def test_what_debug_remembers_is_bounded() -> None:
    world = Deployment(ended_requests_max=2)
    for rid in "abc":
        world.submit(request(rid, max_new_tokens=1))
        world.prefilled("p0", rid, 10, finish="stop")
    assert world.core.debug("a") is None
    assert world.core.debug("c") is not None


def test_times_are_measured_for_every_stage_and_every_token() -> None:
    world = Deployment()
    world.submit(request("r"))
    world.wait(1.0)
    world.prefilled("p0", "r", 10)
    world.wait(0.5)
    world.generated("d0", "r", 1, 11, 12)
    world.finished("d0", "r", 3)
    observed = list(world.core.counters.observations)
    assert ("queue_seconds", 0.0) in observed
    assert ("ttft_seconds", 1.0) in observed
    assert observed.count(("itl_seconds", 0.25)) == 2
    assert ("request_seconds", 1.5) in observed


def test_four_workers_share_light_sequential_requests() -> None:
    world = Deployment(2, 2)
    for rid in "abcd":
        world.submit(request(rid, max_new_tokens=2))
        prefill = world.placed(Prefill, rid)
        assert prefill is not None
        world.prefilled(prefill, rid, 10)
        decode = world.placed(Decode, rid)
        assert decode is not None
        world.generated(decode, rid, 1, 11)
        world.finished(decode, rid, 2)
    assert [peer for peer, _ in world.sent(Prefill)] == ["p0", "p1", "p0", "p1"]
    assert [peer for peer, _ in world.sent(Decode)] == ["d0", "d1", "d0", "d1"]


def test_the_limits_of_the_fleet_are_the_context_the_shell_may_offer() -> None:
    world = Deployment(1, 0, limits=LIMITS)
    assert world.core.fleet.context_len("m") == 4096
    world.up("decode", "d0", limits=Limits(4096, 16, pages=10, slots=1))
    assert world.core.fleet.context_len("m") == 160

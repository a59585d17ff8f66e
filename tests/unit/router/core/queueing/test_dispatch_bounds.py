"""Who waits for which worker, what is refused, and what ends in time: every bound of the router core is an answer."""

from __future__ import annotations

import msgspec
import pytest

from router.core.effects import RequestFailed
from router.core.requests.live_request import VISITS_MAX
from shared.links.events import Received
from shared.wire.grammar import Grammar
from shared.wire.messages import Cancel, Decode, Failed, Limits, Load, Prefill, Prefilled, Serve
from shared.wire.sampling_params import SamplingParams
from tests.unit.router.deployment import LIMITS, ScriptedDeployment, decoding, request


def test_no_room_costs_no_attempt_and_goes_elsewhere() -> None:
    world = ScriptedDeployment(1, 2)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.refused("d0", "r", "no_room")
    assert [(peer, sent.attempt) for peer, sent in world.sent(Decode)] == [("d0", 1), ("d1", 1)]


def test_a_worker_without_room_is_asked_again_after_a_pause_not_at_once() -> None:
    world = ScriptedDeployment(no_room_seconds=0.1)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.refused("d0", "r", "no_room")
    world.loaded("d0")
    assert len(world.sent(Decode)) == 1
    world.wait(0.11)
    assert len(world.sent(Decode)) == 2


def test_the_placements_remembered_of_a_request_are_bounded() -> None:
    world = ScriptedDeployment(no_room_seconds=0.1)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    for _ in range(2 * VISITS_MAX):
        world.refused("d0", "r", "no_room")
        world.wait(0.11)
    assert len(world.sent(Decode)) > VISITS_MAX
    shown = world.core.debug("r")
    assert shown is not None
    assert len(shown["workers"]) == VISITS_MAX  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_stream_that_has_begun_waits_for_room_as_long_as_it_takes(tokens: int) -> None:
    world = ScriptedDeployment(no_room_seconds=0.5, waiting_seconds_max=2.0, worker_return_seconds=3.0)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    if tokens > 1:
        world.joined("d0", "r")
        world.generated("d0", "r", 1, *range(11, 10 + tokens))
        world.refused("d0", "r", "stale")  # retracted, and host memory had no room: it is computed again
        world.loaded("p0", accepting=False)
        world.wait(100)
        assert world.state("r") == "prefilling"  # it was placed before
        world.prefilled("p0", "r", 20, attempt=2, index=tokens)
    world.loaded("d0", slots_free=0)
    for _ in range(200):
        if world.state("r") == "decoding":
            world.refused("d0", "r", "no_room")
        world.wait(0.5)
    assert world.outcome("r") is None
    world.loaded("d0")
    assert world.state("r") == "decoding"


def test_a_stream_that_has_begun_waits_before_prefill_as_long_as_it_takes() -> None:
    world = decoding(waiting_seconds_max=2.0, worker_return_seconds=3.0)
    world.loaded("p0", accepting=False)
    world.loaded("p1", accepting=False)
    world.down("d0")
    world.wait(100)
    assert (world.state("r"), world.outcome("r")) == ("waiting", None)


def test_a_ready_request_that_no_worker_could_continue_ends_with_503_and_its_lease_too() -> None:
    world = ScriptedDeployment(worker_return_seconds=3.0)
    world.loaded("d0", slots_free=0)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.down("d0")
    world.wait(2.9)
    assert world.outcome("r") is None
    world.wait(0.1)
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert (outcome.status, outcome.code) == (503, "no_worker")
    assert world.sent(Cancel) == [("p0", Cancel("r", 1))]
    world.assert_nothing_left()


def test_streams_that_have_begun_are_computed_before_new_prompts_and_past_all_bounds() -> None:
    world = decoding(tenant_running_max=1, ready_max=1)
    world.loaded("p0", accepting=False)
    world.loaded("p1", accepting=False)
    world.submit(request("new"))
    world.down("d0")
    world.loaded("p0")
    assert world.state("r") == "prefilling"
    assert world.state("new") == "waiting"


def test_a_full_queue_is_a_429_that_says_when_to_come_again() -> None:
    world = ScriptedDeployment(max_queued_requests=2)
    world.loaded("p0", accepting=False)
    for rid in ("a", "b", "c"):
        world.submit(request(rid))
    assert (world.outcome("a"), world.outcome("b")) == (None, None)
    outcome = world.outcome("c")
    assert isinstance(outcome, RequestFailed)
    assert (outcome.status, outcome.retry_after_seconds) == (429, 1.0)


@pytest.mark.parametrize(("prefill", "decode"), [(0, 0), (0, 1), (1, 0)])
def test_without_workers_of_a_role_a_bounded_number_is_held_and_served_once_they_come(
    prefill: int, decode: int
) -> None:
    world = ScriptedDeployment(prefill, decode, max_queued_requests=2, waiting_seconds_max=7.0)
    for rid in ("a", "b", "c"):
        world.submit(request(rid))
    outcome = world.outcome("c")
    assert isinstance(outcome, RequestFailed)
    assert (outcome.status, outcome.retry_after_seconds, outcome.code) == (503, 1.0, "no_worker")
    world.wait(6.9)
    assert (world.outcome("a"), world.outcome("b")) == (None, None)
    world.up("prefill", "p1")
    world.up("decode", "d1")
    assert [message.rid for _, message in world.sent(Prefill)] == ["a", "b"]


@pytest.mark.parametrize(("prefill", "decode"), [(0, 0), (0, 1), (1, 0)])
def test_a_request_that_waited_in_vain_for_a_role_gets_503_with_retry_after(
    prefill: int, decode: int
) -> None:
    world = ScriptedDeployment(prefill, decode, waiting_seconds_max=7.0)
    world.submit(request("r"))
    world.wait(7.0)
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert (outcome.status, outcome.retry_after_seconds, outcome.code) == (503, 1.0, "no_worker")
    world.assert_nothing_left()


def test_a_request_no_worker_takes_in_time_is_a_503() -> None:
    world = ScriptedDeployment(waiting_seconds_max=7.0)
    world.loaded("p0", accepting=False)
    world.submit(request("r"))
    world.wait(6.9)
    assert world.outcome("r") is None
    world.wait(0.1)
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert outcome.status == 503


def test_a_request_past_its_time_limit_is_a_504_and_cancelled() -> None:
    world = decoding(request_seconds_max=20.0)
    world.wait(20.0)
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
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
    world = ScriptedDeployment()
    world.submit(request("r", **fields))  # type: ignore[arg-type]
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert (outcome.status, outcome.param) == (status, param)
    assert not world.sent(Prefill)


def test_a_request_that_fits_exactly_is_served() -> None:
    world = ScriptedDeployment()
    world.submit(request("r", prompt=(1,) * 4088))
    assert world.sent(Prefill)


def test_a_worker_that_finds_it_too_long_ends_it_with_400() -> None:
    world = ScriptedDeployment()
    world.submit(request("r"))
    world.refused("p0", "r", "too_long")
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert outcome.status == 400


def test_a_request_that_a_worker_calls_at_fault_ends_and_is_not_tried_again() -> None:
    world = ScriptedDeployment()
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.say("d0", Failed("r", 1, 400, "grammar_too_complex", "too many states"))
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert (outcome.status, outcome.code, outcome.message) == (400, "grammar_too_complex", "too many states")
    assert len(world.sent(Prefill)) == 1


def test_sampling_that_no_worker_knows_is_refused_at_once() -> None:
    world = ScriptedDeployment()
    world.submit(
        request("r", params=SamplingParams(max_new_tokens=8, seed=0, grammar=Grammar("regex", "a+")))
    )
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert (outcome.status, outcome.code) == (400, "not_served")
    assert outcome.message == "The prefill workers of this deployment do not serve grammar."
    assert not world.sent(Prefill)


def test_prefill_workers_are_not_flooded_and_the_first_come_goes_first() -> None:
    world = ScriptedDeployment(
        1, 1, limits=Limits(4096, 16, 512, slots=1, vocab_size=10), prefilling_per_slot=2.0
    )
    for rid in "abcd":
        world.submit(request(rid))
    world.submit(request("urgent", priority=5))
    assert [message.rid for _, message in world.sent(Prefill)] == ["a", "b"]
    for rid in ("a", "b", "urgent"):
        world.prefilled("p0", rid, 10)
    assert [message.rid for _, message in world.sent(Prefill)] == ["a", "b", "urgent", "c", "d"]


def test_prefill_stops_while_ready_requests_tie_up_pages() -> None:
    world = ScriptedDeployment(ready_max=2)
    world.loaded("d0", slots_free=0)
    for rid in "abc":
        world.submit(request(rid))
        if rid != "c":
            world.prefilled("p0", rid, 10)
    assert len(world.sent(Prefill)) == 2
    world.cancel("a")
    assert len(world.sent(Prefill)) == 3


def _large_in_front(backfill_max: int = 32) -> ScriptedDeployment:
    """A large request waits for room on d0, which has a few pages."""
    world = ScriptedDeployment(backfill_max=backfill_max)
    world.loaded("d0", free_pages=3)
    world.submit(request("large", prompt=(1,) * 100))
    world.prefilled("p0", "large", 10)
    assert not world.sent(Decode)
    return world


def test_one_that_fits_goes_past_a_large_request_that_waits_for_room() -> None:
    world = _large_in_front()
    world.submit(request("small"))
    world.prefilled("p0", "small", 10)
    assert [message.rid for _, message in world.sent(Decode)] == ["small"]
    world.finished("d0", "small", 1)
    world.loaded("d0", free_pages=10)
    assert world.placed(Decode, "large") == "d0"


def test_room_is_kept_for_a_large_request_once_many_have_gone_past_it() -> None:
    world = _large_in_front(backfill_max=2)
    for rid in ("a", "b", "c"):
        world.submit(request(rid))
        world.prefilled("p0", rid, 10)
    assert [message.rid for _, message in world.sent(Decode)] == ["a", "b"]
    world.finished("d0", "a", 1)
    world.loaded("d0", free_pages=10)
    assert [message.rid for _, message in world.sent(Decode)] == ["a", "b", "large", "c"]


def test_room_that_is_kept_for_a_tenant_is_not_kept_from_one_that_has_less_running() -> None:
    world = _large_in_front(backfill_max=0)
    world.submit(request("same"))
    world.prefilled("p0", "same", 10)
    world.submit(request("other", tenant="other"))
    world.prefilled("p0", "other", 10)
    assert [message.rid for _, message in world.sent(Decode)] == ["other"]


def test_it_is_let_in_as_soon_as_one_of_the_others_of_that_tenant_is_placed() -> None:
    world = ScriptedDeployment(backfill_max=0)
    world.up("prefill", "other model", model_name="n")
    world.down("other model")
    world.loaded("d0", running=1, free_pages=3, pages_for_new=3)
    world.submit(request("large", prompt=(1,) * 100, tenant="a"))
    world.submit(request("b", tenant="b"))
    world.submit(request("a", model="n", max_new_tokens=1, tenant="a"))
    assert not world.sent(Prefill)
    world.up("prefill", "other model", model_name="n")
    assert [message.rid for _, message in world.sent(Prefill)] == ["a", "b"]


@pytest.mark.parametrize(("versions", "placed"), [(1, []), (2, ["new"])])
def test_room_that_is_kept_for_a_stream_that_was_cut_is_kept_from_new_prompts_of_its_only_version(
    versions: int, placed: list[str]
) -> None:
    limits = msgspec.structs.replace(LIMITS, extend_tokens=64)
    world = ScriptedDeployment(0, 0, backfill_max=0)
    for number in range(2):
        world.up("decode", f"d{number}", limits=limits, understands=("Serve",))
    world.submit(request("cut", prompt=(1,) * 100))
    here = world.placed(Serve, "cut") or ""
    there = ({"d0", "d1"} - {here}).pop()
    world.say(here, Prefilled("cut", 1, 0, (10,), None))
    if versions == 2:
        world.up("decode", "later", limits=limits, understands=("Serve",), model="later weights")
        world.loaded("later", free_pages=0, running=1)
    world.loaded(there, free_pages=3, running=1)
    world.down(here)
    assert world.state("cut") == "waiting"
    world.submit(request("new"))
    assert [message.rid for _, message in world.sent(Serve)] == ["cut", *placed]
    world.loaded(there, free_pages=8, running=1)
    assert world.state("cut") == "extending"


def test_a_refusal_for_lack_of_room_holds_back_only_requests_as_large() -> None:
    world = ScriptedDeployment(no_room_seconds=10.0)
    world.submit(request("large", prompt=(1,) * 100))
    world.prefilled("p0", "large", 10)
    world.refused("d0", "large", "no_room")
    for rid, prompt in (("as large", (1,) * 100), ("small", (1,))):
        world.submit(request(rid, prompt))
        world.prefilled("p0", rid, 10)
    assert [message.rid for _, message in world.sent(Decode)] == ["large", "small"]


def test_a_stuck_model_does_not_hold_up_another() -> None:
    world = ScriptedDeployment()
    world.up("prefill", "p1", model_name="n", model="n")
    world.up("decode", "d1", model_name="n", model="n")
    world.loaded("p0", accepting=False)
    world.submit(request("stuck"))
    world.submit(request("free", model="n"))
    assert world.placed(Prefill, "free") == "p1"
    assert world.placed(Prefill, "stuck") is None


def test_nothing_is_computed_that_no_decode_worker_could_take_over() -> None:
    world = ScriptedDeployment(1, 0)
    world.submit(request("r"))
    assert not world.sent(Prefill)
    world.up("decode", "d0", kv_format="another layout")
    assert not world.sent(Prefill)
    world.up("decode", "d1")
    assert world.sent(Prefill)


def test_a_worker_of_another_protocol_is_not_used() -> None:
    world = ScriptedDeployment(0, 1)
    world.up("prefill", "p0", protocol=99)
    world.submit(request("r"))
    assert not world.sent(Prefill)
    assert world.core.counters.workers_refused == {"protocol": 1}


def test_four_workers_share_light_sequential_requests() -> None:
    world = ScriptedDeployment(2, 2)
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
    world = ScriptedDeployment(1, 0, limits=LIMITS)
    assert world.core.fleet.context_len("m") == 4096
    world.up("decode", "d0", limits=Limits(4096, 16, pages=10, slots=1))
    assert world.core.fleet.context_len("m") == 160


def test_events_that_come_together_are_followed_by_one_placement_that_knows_them_all() -> None:
    world = ScriptedDeployment(2, 1)
    for uid in ("p0", "p1"):
        world.loaded(uid, accepting=False)
    world.submit(request("r"))
    crowded, idle = Load(queued_tokens=500, slots_free=4), Load(slots_free=4)
    world.link(Received("p0", crowded), Received("p1", idle))
    assert world.placed(Prefill, "r") == "p1"

"""What the router core does with a request that nothing goes wrong with, or that its client gives up."""

from __future__ import annotations

from router.core.effects import NewTokens, RequestCompleted, RequestEnded, Usage
from shared.batch.effects import Send
from shared.wire.messages import Cancel, Decode, Prefill, Release, Renew
from tests.unit.router.deployment import ScriptedDeployment, decoding, request


def test_a_request_passes_prefill_and_decode_and_ends_with_its_usage() -> None:
    world = ScriptedDeployment()
    world.submit(request("r", max_new_tokens=3))
    (send,) = world.news()
    assert isinstance(send, Send)
    assert isinstance(send.message, Prefill)
    assert (send.peer, send.message.token_ids, send.message.prompt_len) == ("p0", (1, 2, 3), 3)
    world.prefilled("p0", "r", 10)
    first, decode = world.news()
    assert first == NewTokens("r", 0, (10,))
    assert isinstance(decode, Send)
    assert isinstance(decode.message, Decode)
    assert decode.message.token_ids == (1, 2, 3, 10)
    assert decode.message.baton.kv_len == len(decode.message.token_ids) - 1
    world.joined("d0", "r")
    assert world.news() == [Send("p0", Release("r", 1))]
    world.generated("d0", "r", 1, 11, 12)
    world.finished("d0", "r", 3)
    assert world.news() == [
        NewTokens("r", 1, (11, 12)),
        RequestEnded("r", RequestCompleted("length", Usage(3, 3, 2))),
    ]
    world.assert_nothing_left()
    assert +world.core.counters.requests == {"length": 1}
    assert world.core.next_deadline() is None


def test_the_first_tokens_release_the_lease_if_nothing_was_said_of_joining() -> None:
    world = ScriptedDeployment()
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.generated("d0", "r", 1, 11)
    assert world.sent(Release) == [("p0", Release("r", 1))]
    world.joined("d0", "r")
    assert len(world.sent(Release)) == 1


def test_a_request_that_ends_with_its_first_token_never_sees_decode() -> None:
    world = ScriptedDeployment(1, 0)
    world.submit(request("r", max_new_tokens=1))
    world.prefilled("p0", "r", 10, finish="length")
    assert world.outcome("r") == RequestCompleted("length", Usage(3, 1, 2))
    world.assert_nothing_left()


def test_the_lease_is_renewed_while_ready_and_until_the_pages_have_arrived() -> None:
    world = ScriptedDeployment(renew_seconds=1.0)
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


def test_a_stop_string_completes_the_request_and_calls_the_worker_off() -> None:
    world = decoding()
    world.stop("r")
    world.generated("d0", "r", 2, 12)
    assert world.outcome("r") == RequestCompleted("stop", Usage(3, 2, 2))
    assert world.sent(Cancel) == [("d0", Cancel("r", 1))]
    assert world.output("r") == [10, 11]


def test_debug_tells_where_a_request_was_and_why_but_no_token() -> None:
    world = decoding()
    world.wait(2.0)
    world.finished("d0", "r", 2)
    shown = world.core.debug("r")
    assert shown is not None
    workers = shown["workers"]
    assert isinstance(workers, list)
    assert [(worker["role"], worker["worker"]) for worker in workers] == [("prefill", "p0"), ("decode", "d0")]
    assert all(worker["why"] for worker in workers)
    assert (shown["fetched_bytes"], shown["cached_tokens"], shown["completion_tokens"]) == (64, 2, 2)
    assert shown["fetch_milliseconds"] == 10.0
    assert (shown["transport"], shown["link_bytes_per_second"]) == ("tcp/eth0", 5_000_000_000)
    assert shown["stage_milliseconds"]["decoding"] == 2000.0  # type: ignore[index]
    assert "token_ids" not in str(shown)
    assert world.core.debug("unknown") is None


def test_what_debug_remembers_is_bounded() -> None:
    world = ScriptedDeployment(ended_requests_max=2)
    for rid in "abc":
        world.submit(request(rid, max_new_tokens=1))
        world.prefilled("p0", rid, 10, finish="stop")
    assert world.core.debug("a") is None
    assert world.core.debug("c") is not None


def test_times_are_measured_for_every_stage_and_every_token() -> None:
    world = ScriptedDeployment()
    world.submit(request("r"))
    world.wait(1.0)
    world.prefilled("p0", "r", 10)
    world.wait(0.5)
    world.generated("d0", "r", 1, 11, 12)
    world.finished("d0", "r", 3)
    counters = world.core.counters
    assert list(counters.queue_seconds) == [0.0]
    assert list(counters.ttft_seconds) == [(1.0, "r")]
    assert list(counters.itl_seconds) == [0.25, 0.25]
    assert list(counters.second_token_seconds) == [0.5]
    assert list(counters.request_seconds) == [(1.5, "r")]

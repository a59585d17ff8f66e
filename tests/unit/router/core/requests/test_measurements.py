"""What the router's core measures of requests and workers, as /metrics and /debug show it."""

from __future__ import annotations

from shared.wire.messages import Draining
from tests.unit.router.deployment import ScriptedDeployment, decoding, request


def test_a_first_token_is_measured_from_the_head_of_its_request() -> None:
    world = ScriptedDeployment()
    world.wait(10.0)
    world.submit(request("r", head_at=7.0, body_at=8.5))
    world.wait(2.0)
    world.prefilled("p0", "r", 10, finish="stop")
    counters = world.core.counters
    assert list(counters.ttft_seconds) == list(counters.request_seconds) == [(5.0, "r")]
    shown = world.core.debug("r")
    assert shown is not None
    stages = shown["stage_milliseconds"]
    assert isinstance(stages, dict)
    assert (stages["body"], stages["tokenizing"], stages["prefilling"]) == (1500.0, 1500.0, 2000.0)
    assert sum(stages.values()) == 5000.0
    assert shown["workers"][0]["after_milliseconds"] == 3000.0  # type: ignore[index]


def test_a_target_counts_from_when_the_router_had_the_prompt() -> None:
    world = ScriptedDeployment(ttft_target_seconds=3.0)
    world.wait(10.0)
    world.submit(request("r", head_at=1.0, body_at=9.0))  # a slow upload is the client's
    world.wait(2.0)
    world.prefilled("p0", "r", 10, finish="stop")
    assert world.core.counters.targets["met"] == 1


def test_the_oldest_request_is_the_one_that_has_waited_longest_for_a_token() -> None:
    world = decoding()
    world.wait(4.0)
    world.generated("d0", "r", 2, 12)
    world.wait(1.0)
    world.submit(request("other"))
    world.wait(2.0)
    oldest = world.core.oldest_by_state(world.now)
    assert (oldest["decoding"], oldest["prefilling"], oldest["waiting"]) == (3.0, 2.0, 0.0)


def test_bytes_are_told_by_what_they_were_moved_for() -> None:
    world = decoding()
    assert (world.core.counters.handoff_bytes, world.core.counters.migration_bytes) == (64, 0)
    world.say("d0", Draining())
    world.migrating("d0", "r", 2)
    world.joined("d1", "r")
    assert (world.core.counters.handoff_bytes, world.core.counters.migration_bytes) == (64, 64)


def test_a_drain_is_measured_until_the_worker_has_gone() -> None:
    world = ScriptedDeployment(decode=2)
    world.say("d0", Draining())
    world.wait(5.0)
    world.say("d0", Draining())
    world.wait(2.0)
    world.down("d0")
    world.down("d1")  # it did not drain
    assert list(world.core.counters.drain_seconds) == [7.0]


def test_sizes_are_those_of_prompts_as_they_come_and_of_outputs_as_they_end() -> None:
    world = decoding()
    assert (list(world.core.counters.prompt_sizes), list(world.core.counters.output_sizes)) == ([3], [])
    world.generated("d0", "r", 2, 12)
    world.finished("d0", "r", 3)
    world.submit(request("gone", token_ids=(1, 2)))
    world.cancel("gone")
    assert (list(world.core.counters.prompt_sizes), list(world.core.counters.output_sizes)) == ([3, 2], [3])


def test_a_rejection_is_counted_by_its_code() -> None:
    world = ScriptedDeployment(max_queued_requests=1, tenant_share_max=1.0)
    world.loaded("p0", accepting=False)
    for number in range(3):
        world.submit(request(f"r{number}"))
    assert world.core.counters.rejections["queue_full"] == 2
    assert world.core.counters.requests["429"] == 2

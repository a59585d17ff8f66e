"""A tenant takes its share and no more: turns in the queues, bounds, tokens per minute, caches of its own."""

from __future__ import annotations

import pytest

from router.config import RouterConfig
from router.core.effects import ClientRequest, RequestCompleted, RequestFailed
from router.core.requests.tenants import IDLE_TENANTS_MAX, Tenants
from shared.primitives.errors import ConfigError
from shared.process.settings import load
from shared.wire.messages import Decode, Limits, Prefill, Prefilled
from tests.unit.router.deployment import LIMITS, ScriptedDeployment, baton, request


def of(tenant: str, rid: str, **fields: object) -> ClientRequest:
    return request(rid, tenant=tenant, **fields)  # type: ignore[arg-type]


def prefills(world: ScriptedDeployment) -> list[str]:
    return [message.rid for _, message in world.sent(Prefill)]


def test_a_newcomer_goes_before_the_queue_of_a_greedy_tenant() -> None:
    world = ScriptedDeployment()
    world.loaded("p0", accepting=False)
    for number in range(6):
        world.submit(of("greedy", f"g{number}"))
    world.loaded("p0")
    assert len(prefills(world)) < 9
    world.loaded("p0", accepting=False)
    for number in range(6, 12):
        world.submit(of("greedy", f"g{number}"))
    world.submit(of("small", "s"))
    for rid in prefills(world):
        world.prefilled("p0", rid, 7, finish="length")
    before = len(prefills(world))
    world.loaded("p0")
    assert "s" in prefills(world)[before : before + 2]


def test_a_tenant_with_twice_the_weight_is_placed_twice_as_often() -> None:
    world = ScriptedDeployment(
        limits=Limits(context_len=4096, page_size=16, pages=512, slots=6, vocab_size=1000),
        tenant_weights=("heavy=2",),
        tenant_share_max=1.0,
    )
    world.loaded("p0", accepting=False)
    for number in range(20):
        world.submit(of("heavy", f"h{number}"))
        world.submit(of("light", f"l{number}"))
    world.loaded("p0")
    placed = prefills(world)
    assert len(placed) == 12
    assert [rid[0] for rid in placed].count("h") == 8


def test_a_request_that_a_worker_took_and_lost_keeps_its_place() -> None:
    world = ScriptedDeployment(1, 2)
    for rid in ("a1", "a2"):
        world.submit(of("a", rid))
        world.prefilled("p0", rid, 10)
    lost = world.placed(Decode, "a1")
    assert lost is not None
    world.joined(lost, "a1")
    world.loaded("p0", accepting=False)
    world.submit(of("b", "b1"))
    world.down(lost)
    world.loaded("p0")
    assert prefills(world)[-2:] == ["a1", "b1"]


def test_requests_that_a_worker_refused_do_not_stand_before_a_newcomer() -> None:
    world = ScriptedDeployment(1, 1, no_room_seconds=1.0)
    for rid in ("a1", "a2"):
        world.submit(of("a", rid))
        world.prefilled("p0", rid, 10)
    for rid in ("a1", "a2"):
        world.refused("d0", rid, "no_room")
    world.submit(of("b", "b1"))
    world.prefilled("p0", "b1", 10)
    world.wait(1.1)
    assert [message.rid for _, message in world.sent(Decode)] == ["a1", "a2", "a1", "b1", "a2"]


def test_no_tenant_may_take_the_last_share_of_the_queue() -> None:
    world = ScriptedDeployment(max_queued_requests=20, tenant_share_max=0.9)
    world.loaded("p0", accepting=False)
    for number in range(19):
        world.submit(of("greedy", f"g{number}"))
    outcome = world.outcome("g18")
    assert isinstance(outcome, RequestFailed)
    assert (outcome.status, outcome.code) == (429, "tenant_queue_full")
    world.submit(of("small", "s"))
    assert world.outcome("s") is None
    assert world.core.counters.rejections["tenant_queue_full"] == 1


def test_no_tenant_may_take_the_last_share_of_what_prefill_workers_are_given() -> None:
    limits = Limits(context_len=4096, page_size=16, pages=512, slots=10, vocab_size=1000)
    world = ScriptedDeployment(limits=limits, tenant_share_max=0.9, ready_max=10)
    for number in range(12):
        world.submit(of("greedy", f"g{number}"))
    assert len(prefills(world)) == 9
    world.submit(of("small", "s"))
    assert prefills(world)[-1] == "s"


def test_a_tenant_alone_on_small_workers_has_all_of_them() -> None:
    world = ScriptedDeployment()
    for number in range(8):
        world.submit(of("alone", f"r{number}"))
    assert len(prefills(world)) == 2 * LIMITS.slots


def test_a_worker_that_accepts_nothing_is_still_asked_for_a_tenant_that_has_nothing_there() -> None:
    world = ScriptedDeployment()
    world.submit(of("greedy", "g0"))
    world.prefilled("p0", "g0", 10)
    world.loaded("d0", accepting=False)
    for tenant, rid in (("greedy", "g1"), ("small", "s")):
        world.submit(of(tenant, rid))
        world.prefilled("p0", rid, 10)
    assert [message.rid for _, message in world.sent(Decode)] == ["g0", "s"]


def test_requests_beyond_a_tenants_running_bound_wait_and_hold_nobody_up() -> None:
    world = ScriptedDeployment(tenant_running_max=1)
    for tenant, rid in (("a", "a1"), ("a", "a2"), ("b", "b1")):
        world.submit(of(tenant, rid))
    assert prefills(world) == ["a1", "b1"]
    world.prefilled("p0", "a1", 10, finish="length")
    assert prefills(world) == ["a1", "b1", "a2"]


def test_tokens_per_minute_answer_429_with_the_time_until_they_are_back() -> None:
    world = ScriptedDeployment(tenant_tokens_per_minute=60)
    world.submit(of("a", "a1", prompt=(1,) * 50))
    world.prefilled("p0", "a1", 10, finish="length")
    assert isinstance(world.outcome("a1"), RequestCompleted)
    world.submit(of("a", "a2", prompt=(1,) * 20))
    refused = world.outcome("a2")
    assert isinstance(refused, RequestFailed)
    assert (refused.status, refused.code, refused.retry_after_seconds) == (429, "tokens_per_minute", 11.0)
    world.submit(of("b", "b1", prompt=(1,) * 20))
    assert world.outcome("b1") is None
    world.wait(11.0)
    world.submit(of("a", "a3", prompt=(1,) * 20))
    assert world.outcome("a3") is None
    assert world.core.counters.rejections["tokens_per_minute"] == 1


def test_output_is_counted_when_it_comes_and_its_debt_is_repaid_first() -> None:
    world = ScriptedDeployment(tenant_tokens_per_minute=60)
    world.submit(of("a", "a1", prompt=(1,) * 60, max_new_tokens=61))
    world.prefilled("p0", "a1", 10)
    world.joined("d0", "a1")
    world.generated("d0", "a1", 1, *range(2, 62))
    world.finished("d0", "a1", 61)
    world.submit(of("a", "a2", prompt=(1,)))
    refused = world.outcome("a2")
    assert isinstance(refused, RequestFailed)
    assert refused.retry_after_seconds == 62.0


def test_a_prompt_larger_than_a_minutes_tokens_is_served_once_the_bucket_is_full() -> None:
    world = ScriptedDeployment(tenant_tokens_per_minute=60)
    world.submit(of("a", "a1", prompt=(1,) * 100))
    assert world.outcome("a1") is None


def test_tenants_are_forgotten_and_those_that_owe_tokens_are_bounded() -> None:
    tenants = Tenants(RouterConfig(tenant_tokens_per_minute=60))
    for number in range(IDLE_TENANTS_MAX + 50):
        tenant = tenants.find(f"tenant {number}", 0.0)
        tenants.enter(tenant)
        tenant.spend(30, 0.0)
        tenants.leave(tenant, 0.0)
    assert (len(tenants), tenants.remembered) == (0, IDLE_TENANTS_MAX)
    last = tenants.find("tenant 20", 30.0)
    tenants.enter(last)
    tenants.leave(last, 30.0)
    assert tenants.remembered == 0


def test_a_tenant_leaves_nothing_behind_when_its_client_hangs_up() -> None:
    world = ScriptedDeployment()
    for number in range(20):
        world.submit(of("greedy", f"g{number}"))
    for number in range(20):
        world.cancel(f"g{number}")
    world.assert_nothing_left()


def test_caches_of_tenants_are_apart_and_equal_at_all_routers() -> None:
    def keys(shared: bool) -> list[str]:
        world = ScriptedDeployment(share_prefix_cache=shared)
        for rid, (tenant, salt) in enumerate((("a", ""), ("b", ""), ("a", "salt"), ("b", "salt"), ("a", ""))):
            world.submit(of(tenant, str(rid), cache_salt=salt))
        return [message.extra_key for _, message in world.sent(Prefill)]

    apart = keys(shared=False)
    assert len(set(apart)) == 4
    assert apart[0] == apart[4]
    assert apart == keys(shared=False)
    shared = keys(shared=True)
    assert shared[0] == shared[1] == shared[4] == ""
    assert shared[2] == shared[3] != ""


def test_a_salt_cannot_be_chosen_to_meet_another_tenants_cache() -> None:
    tenants = Tenants(RouterConfig())
    a, b = tenants.find("a", 0.0), tenants.find("b", 0.0)
    assert a.cache_key(b.key, shared=False) != b.cache_key("", shared=False)
    assert a.cache_key("", shared=True) == b.cache_key("", shared=True)


def test_the_router_expects_a_tenants_prefix_only_where_that_tenant_has_sent_it() -> None:
    prompt = tuple(range(256))
    world = ScriptedDeployment(2, 1)
    world.submit(of("a", "a1", prompt=prompt))
    world.prefilled("p0", "a1", 10, finish="length")
    world.submit(of("b", "b1", prompt=prompt))
    assert world.placed(Prefill, "b1") == "p1"
    world.submit(of("a", "a2", prompt=prompt))
    assert world.placed(Prefill, "a2") == "p0"


@pytest.mark.parametrize(("shared", "told"), [(False, 303), (True, 256)])
def test_where_tenants_share_a_cache_the_figure_is_rounded(shared: bool, told: int) -> None:
    world = ScriptedDeployment(share_prefix_cache=shared)
    world.submit(of("a", "a1", prompt=(1,) * 310))
    world.say("p0", Prefilled("a1", 1, 0, (7,), baton("a1", 1, 310), "length", cached_tokens=303))
    outcome = world.outcome("a1")
    assert isinstance(outcome, RequestCompleted)
    assert outcome.usage.cached_tokens == told


@pytest.mark.parametrize("value", ["a", "a=0", "=1", "a=much", "a=-1", "a=inf"])
def test_a_weight_that_is_none_is_refused_at_the_start(value: str) -> None:
    with pytest.raises(ConfigError, match="NAME=WEIGHT"):
        load(RouterConfig, ["--tenant-weights", value], {})


def test_a_proxy_that_is_no_address_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="networks such as"):
        load(RouterConfig, ["--trusted-proxies", "ingress"], {})

"""One tenant cannot take all of a decode worker: a request below its share finds a slot and pages as it grows."""

from __future__ import annotations

import msgspec
import pytest

from shared.wire.messages import Cancel, Decode, Finished, Joined, Load, Refused
from tests.unit.decode.bench import DecodeBench
from tests.unit.scheduling.worker_bench import VOCAB_SIZE, decode, prompt


def of(tenant: str, rid: str, family: int, *, prompt_len: int = 7, max_new_tokens: int = 40) -> Decode:
    command = decode(rid, prompt(prompt_len, family), max_new_tokens)
    return msgspec.structs.replace(command, tenant=tenant)


def flooded(requests: int = 12, **settings: object) -> DecodeBench:
    """One tenant has sent as much as the worker takes of it, and more: all that came in runs."""
    bench = DecodeBench(
        **{"pages": 40, "tenant_share_max": 0.8, "max_running_requests": 10, **settings}  # type: ignore[arg-type]
    )
    for number in range(requests):
        bench.send(of("greedy", f"g{number}", number))
    bench.turn(2)
    bench.fetcher.land_all()
    bench.turn(4)
    return bench


def refused(bench: DecodeBench) -> list[str]:
    return [said.rid for said in bench.said(Refused)]


def ended(bench: DecodeBench) -> set[str]:
    return {said.rid for said in bench.said(Finished)} | set(refused(bench))


def joined(bench: DecodeBench) -> list[str]:
    return [said.rid for said in bench.said(Joined)]


def test_one_tenant_leaves_slots_and_pages_to_others() -> None:
    bench = flooded()
    assert bench.core.slots_used == 8
    assert bench.core.memory.available_pages >= 8


def test_a_worker_tells_how_many_slots_it_gives_to_anybody() -> None:
    bench = flooded(requests=0, load_seconds=0.001)
    assert (bench.said(Load)[-1].slots_free, bench.said(Load)[-1].slots_for_new) == (10, 10)
    bench = flooded(requests=5, load_seconds=0.001)
    bench.now += 0.1
    bench.turn()
    assert (bench.said(Load)[-1].slots_free, bench.said(Load)[-1].slots_for_new) == (5, 3)


def test_a_request_below_its_share_joins_a_worker_that_is_full_for_the_greedy_tenant() -> None:
    bench = flooded()
    bench.send(of("small", "s", 99, max_new_tokens=4), of("greedy", "late", 98))
    bench.turn(2)
    bench.fetcher.land_all()
    bench.turn(6)
    assert "late" in refused(bench)
    assert "s" in joined(bench)
    assert "s" in [said.rid for said in bench.said(Finished)]


def test_a_request_below_its_share_is_backfilled_while_requests_of_the_greedy_tenant_are_retracted() -> None:
    bench = flooded()
    bench.run_until(lambda: bench.core.counters.retractions > 0)
    assert not bench.core._load().accepting
    bench.send(of("small", "s", 99, max_new_tokens=4), of("greedy", "late", 98))
    bench.turn(2)
    bench.fetcher.land_all()
    bench.turn(6)
    assert "late" in refused(bench)
    assert "s" in [said.rid for said in bench.said(Finished)]


def test_a_retracted_request_does_not_return_into_the_slots_that_are_kept() -> None:
    bench = flooded(retract_steps=2)
    bench.run_until(lambda: bench.core.counters.retractions > 0)
    bench.device.finish_copies()
    bench.turn()
    assert len(bench.core._retraction.line) == 2
    below = [of("small", f"s{number}", 90 + number, prompt_len=3, max_new_tokens=14) for number in range(6)]
    bench.send(
        *(Cancel(rid, 1) for rid in ("g2", "g3", "g4"))
    )  # their pages are enough for one that returns …
    bench.send(*below[:5])  # … but their slots are taken
    bench.turn()
    assert bench.core.slots_used == 8
    assert len(bench.core._retraction.line) == 2
    bench.send(below[5])
    bench.turn()
    assert bench.core.slots_used == 9
    bench.run()
    assert bench.core.counters.resumes >= 2
    assert bench.holds_nothing


def test_a_request_below_its_share_grows_at_the_greedy_tenants_cost() -> None:
    bench = flooded()
    bench.send(of("small", "s", 99, max_new_tokens=40))
    bench.turn(2)
    bench.fetcher.land_all()
    bench.run()
    assert bench.core.counters.retractions > 0
    small = next(said for said in bench.said(Finished) if said.rid == "s")
    assert small.retractions == 0
    assert sorted(refused(bench) + [said.rid for said in bench.said(Finished)]) == sorted(
        ["s", *(f"g{number}" for number in range(12))]
    )
    assert bench.holds_nothing


def test_a_tenant_that_is_alone_grows_into_the_whole_pool() -> None:
    bench = DecodeBench(pages=12, tenant_share_max=0.5)
    bench.send(of("alone", "a", 1, prompt_len=7, max_new_tokens=41))  # up to twelve pages
    bench.run()
    assert len(bench.tokens("a")) == 40
    assert bench.core.counters.retractions == 0


@pytest.mark.parametrize("tenant", ["", "alone"])
def test_a_share_of_one_keeps_nothing_back(tenant: str) -> None:
    bench = DecodeBench(pages=40, tenant_share_max=1.0, max_running_requests=10)
    for number in range(10):
        bench.send(of(tenant, f"r{number}", number))
    bench.turn(2)
    assert bench.core.slots_used == 10


def unlike_others(length: int, number: int) -> tuple[int, ...]:
    """A prompt of thousands that share no page."""
    return tuple((number * 7919 + position * number) % (VOCAB_SIZE - 1) + 1 for position in range(length))


def finished_of_equal_tenants(tenants: int, *, offered: int = 24, turns: int = 1000) -> int:
    """How many requests finish on a worker to which these tenants together always offer as many."""
    bench = DecodeBench(
        pages=200,
        host_pages=400,
        tenant_share_max=0.95,
        max_running_requests=24,
        init_new_token_ratio=0.7,
        retract_steps=20,
    )
    tenant_of: dict[str, int] = {}
    number = finished = 0
    for _ in range(turns):
        for tenant in range(tenants):
            for _ in range(offered // tenants - list(tenant_of.values()).count(tenant)):
                number += 1
                tenant_of[f"r{number}"] = tenant
                request = decode(f"r{number}", unlike_others(24, number), 100)
                bench.send(msgspec.structs.replace(request, tenant=f"t{tenant}"))
        bench.turn()
        bench.fetcher.land_all()
        bench.device.finish_copies()
        finished += len(bench.said(Finished))
        for rid in ended(bench):
            del tenant_of[rid]
        bench.heard.clear()
    return finished


def test_a_worker_finishes_as_much_for_many_tenants_as_for_one() -> None:
    alone = finished_of_equal_tenants(1)
    assert alone > 40
    for tenants in (2, 4, 12, 24):
        assert finished_of_equal_tenants(tenants) >= 0.9 * alone, f"{tenants} tenants"


@pytest.mark.parametrize(("tenants", "output"), [(20, 12), (12, 30)])
def test_a_retracted_request_returns_however_many_small_ones_come(tenants: int, output: int) -> None:
    bench = DecodeBench(pages=60, host_pages=120, tenant_share_max=0.95, max_running_requests=40)
    bench.send(of("large", "l", 1, prompt_len=120, max_new_tokens=60))
    bench.turn(2)
    bench.fetcher.land_all()
    small: dict[str, str] = {}  # requests that are here, by tenant
    number = 0
    while "l" not in [said.rid for said in bench.said(Finished)]:
        assert number < 5_000, "the large request starves"
        for tenant in (f"t{index}" for index in range(tenants)):
            if tenant not in small:
                number += 1
                small[tenant] = f"s{number}"
                request = decode(f"s{number}", unlike_others(7, number), output)
                bench.send(msgspec.structs.replace(request, tenant=tenant))
        bench.heard.clear()
        bench.turn()
        bench.fetcher.land_all()
        bench.device.finish_copies()
        small = {tenant: rid for tenant, rid in small.items() if rid not in ended(bench)}
    assert bench.core.counters.retractions > 0

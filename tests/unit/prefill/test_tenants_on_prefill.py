"""One tenant cannot take all of a prefill worker: who has had least goes first, leases or not."""

from __future__ import annotations

import msgspec

from shared.wire.messages import Prefill, Prefilled
from tests.unit.prefill.bench import PrefillBench
from tests.unit.scheduling.worker_bench import prefill, prompt


def of(tenant: str, rid: str, family: int, *, length: int = 8) -> Prefill:
    return msgspec.structs.replace(prefill(rid, prompt(length, family)), tenant=tenant)


def order(bench: PrefillBench) -> list[str]:
    return [said.rid for said in bench.said(Prefilled)]


def test_a_newcomer_goes_before_the_line_of_a_greedy_tenant() -> None:
    bench = PrefillBench(max_running_requests=1, words=32)
    bench.send(*(of("greedy", f"g{number}", number) for number in range(6)), of("small", "s", 9))
    bench.run_until(lambda: len(order(bench)) == 7)
    assert order(bench).index("s") <= 1
    assert [rid for rid in order(bench) if rid != "s"] == [f"g{number}" for number in range(6)]


def test_leases_of_one_tenant_do_not_hold_up_another() -> None:
    bench = PrefillBench(pages=64, lease_fraction=0.1, words=32)
    bench.send(*(of("greedy", f"g{number}", number) for number in range(12)))
    bench.turn(30)
    held = len(order(bench))
    assert held < 12
    bench.send(of("small", "s", 99))
    bench.turn(6)
    assert order(bench)[held:] == ["s"]


def test_one_tenant_leaves_lease_words_to_others() -> None:
    bench = PrefillBench(pages=64, words=10, tenant_share_max=0.8)
    bench.send(*(of("greedy", f"g{number}", number) for number in range(12)))
    bench.turn(40)
    assert len(order(bench)) == 8
    bench.send(of("small", "s", 99))
    bench.turn(6)
    assert order(bench)[8:] == ["s"]


def test_many_tenants_together_leave_most_of_the_pool_unleased() -> None:
    bench = PrefillBench(pages=240, lease_fraction=0.1, words=200, max_running_requests=8)
    bench.send(of("greedy", "g", 99, length=120))
    for number in range(96):
        bench.send(of(f"t{number % 24}", f"r{number}", number, length=12))
    bench.turn(100)
    assert bench.core.leases.pages >= 0.1 * 240
    assert bench.core.leases.pages <= 0.3 * 240

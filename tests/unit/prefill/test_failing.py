"""What a prefill worker does with a request that no token can follow."""

from __future__ import annotations

import pytest

from shared.wire.messages import Cancel, Failed, Prefilled
from tests.unit.prefill.bench import PrefillBench
from tests.unit.scheduling.worker_bench import prefill, prompt


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_without_a_first_token_ends_by_its_own_fault(overlap: bool) -> None:
    bench = PrefillBench(overlap=overlap)
    bench.device.failures[1] = 0
    bench.send(prefill("a", prompt(9)), prefill("b", prompt(9), seed=2))
    bench.run()
    assert bench.said(Failed) == [Failed("a", 1, 400, "grammar_too_complex", "scripted")]
    assert [said.rid for said in bench.said(Prefilled)] == ["b"]
    bench.send(Cancel("b", 1))
    bench.run()
    assert bench.holds_nothing

"""Pages are counted from the memory there is, with figures a person can check."""

from __future__ import annotations

import dataclasses

import pytest

from shared.engine.checkpoint.memory_plan import RESERVE_BYTES, Demand, choose_pages
from shared.engine.config import Budget
from shared.primitives.errors import ConfigError, ModelError

GIB = 2**30
# A full request is 256 pages, a quarter of a GiB.
DEMAND = Demand(
    weights_bytes=GIB, page_bytes=2**20, page_size=16, host_fraction=0.0, slots=64, context_len=4096
)


def test_pages_get_what_weights_and_reserve_leave() -> None:
    pages, reason = choose_pages(DEMAND, Budget(3 * GIB, "a test"), None)
    assert pages == (3 * GIB - GIB - RESERVE_BYTES) // 2**20
    assert reason == (
        "3.00 GiB (a test) less 1.00 GiB of weights and 1.00 GiB of reserve leaves 1.00 GiB for KV"
    )


def test_host_pages_are_memory_too() -> None:
    pages, reason = choose_pages(
        dataclasses.replace(DEMAND, host_fraction=1.0), Budget(3 * GIB, "a test"), None
    )
    assert pages == 512
    assert reason.endswith("for KV and 100% of it again in host pages")


def test_no_more_pages_than_all_slots_can_fill() -> None:
    pages, reason = choose_pages(dataclasses.replace(DEMAND, slots=2), Budget(30 * GIB, "a test"), None)
    assert pages == 512
    assert reason == "enough for 2 requests of 4096 tokens"


@pytest.mark.parametrize(
    ("tokens", "pages"), [(10_000, 625), (10_001, 626), (100, 256), (10**9, 1024)], ids=str
)
def test_no_more_pages_than_asked_for_but_for_one_request(tokens: int, pages: int) -> None:
    demand = dataclasses.replace(DEMAND, max_total_tokens=tokens)
    found, reason = choose_pages(demand, Budget(3 * GIB, "a test"), None)
    assert found == pages
    assert ("as configured" in reason) == (100 < tokens < 10**9)
    assert ("the least there is" in reason) == (tokens == 100)


def test_too_little_memory_for_one_request_is_refused_with_figures() -> None:
    with pytest.raises(ModelError, match=r"2.10 GiB \(a test\).*0.10 GiB for KV.*4096 tokens needs 0.25 GiB"):
        choose_pages(DEMAND, Budget(int(2.1 * GIB), "a test"), None)


def test_an_explicit_number_wins_but_must_fit() -> None:
    budget = Budget(3 * GIB, "a test")
    assert choose_pages(DEMAND, budget, 7) == (7, "as configured")
    with pytest.raises(ConfigError, match=r"1025 pages need 1\.00 GiB"):
        choose_pages(DEMAND, budget, 1025)

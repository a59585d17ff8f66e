"""Who is below its share, who holds most and who goes first among tenants."""

from __future__ import annotations

from collections import Counter

import pytest

from shared.batch.req import Req
from shared.scheduling.tenant_shares import (
    heaviest_tenant,
    is_below_share,
    least_served_first,
    share_of,
    tokens_by_tenant,
)
from shared.wire.sampling_params import SamplingParams

PARAMS = SamplingParams(max_new_tokens=8, seed=0)


def req(tenant: str, tokens: int, sequence: int = 0) -> Req:
    return Req(f"r{sequence}", 1, "router", sequence, [1] * tokens, tokens, PARAMS, tenant=tenant)


def test_a_request_is_below_its_share_if_another_tenant_would_still_hold_more() -> None:
    held = Counter(a=20, b=5)
    assert is_below_share(req("b", 14), held, 14, 1000)
    assert not is_below_share(req("b", 15), held, 15, 1000)
    assert not is_below_share(req("a", 1), held, 1, 1000)
    assert is_below_share(req("c", 19), held, 19, 1000)


def test_a_request_is_below_its_share_only_within_an_even_share_for_its_tenant_and_one_more() -> None:
    held = Counter(a=100, b=5)
    assert is_below_share(req("b", 2), held, 15, 60)  # of three shares b takes one
    assert not is_below_share(req("b", 2), held, 16, 60)
    assert is_below_share(req("c", 2), held, 15, 60)  # of four shares c takes one
    assert not is_below_share(req("c", 2), held, 16, 60)


def test_with_one_tenant_no_request_is_below_its_share() -> None:
    assert not is_below_share(req("a", 1), Counter(), 1, 1000)
    assert not is_below_share(req("a", 1), Counter(a=100), 1, 1000)


def test_what_tenants_hold_are_the_tokens_of_their_requests() -> None:
    assert tokens_by_tenant([req("a", 10), req("a", 10), req("b", 5)]) == Counter(a=20, b=5)


def test_the_heaviest_tenant_holds_most_tokens_not_most_requests() -> None:
    assert heaviest_tenant([req("a", 1), req("a", 1), req("b", 3)]) == "b"


def test_tenants_take_turns_by_tokens_and_each_keeps_its_order() -> None:
    waiting = [req("a", 10, 1), req("a", 10, 2), req("a", 10, 3), req("b", 15, 4), req("b", 1, 5)]
    assert [each.sequence for each in least_served_first(waiting, Counter())] == [1, 4, 2, 5, 3]
    assert [each.sequence for each in least_served_first(waiting, Counter(a=100))] == [4, 5, 1, 2, 3]
    alone = waiting[:3]
    assert least_served_first(alone, Counter(a=7)) == alone


@pytest.mark.parametrize(("places", "share"), [(1, 1), (2, 2), (8, 8), (20, 19), (64, 61), (768, 730)])
def test_a_share_is_of_whole_places_and_small_numbers_are_not_split(places: int, share: int) -> None:
    assert share_of(places, 0.95) == share

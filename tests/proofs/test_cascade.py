"""The cascade, small: its promises are kept, and mistakes that it is about break them."""

from __future__ import annotations

import pytest

from tests.proofs.cascade import CascadeSize, prove
from tests.simulation.mistakes.mutations import mutated

SMALL = CascadeSize(
    sessions=8,
    turns=7,
    prefill_workers=1,
    victims=("decode", "prefill", "decode"),
    between_seconds=4.0,
    back_seconds=7.0,
    pool_tokens=32_768,
    first_prompt=(200, 500),
    further_prompt=(20, 80),
    thinking=(0.1, 0.5),
)


def test_three_workers_die_and_no_request_fails_nor_does_a_token_differ() -> None:
    result = prove(SMALL, seed=0)
    assert result.seen["killed"] == {"decode killed": 2, "prefill killed": 1}
    assert result.seen["streams continued elsewhere"], "nothing ran on the workers that died"
    assert result.broken == []


@pytest.mark.parametrize(
    ("mistake", "broken"),
    [
        ("requests of a lost worker are not tried again", "failed"),
        ("a request joins with the token before its last", "tokens different"),
        ("the output index starts anew with each attempt", "tokens different"),
    ],
)
def test_a_mistake_breaks_a_promise(mistake: str, broken: str) -> None:
    with mutated(mistake):
        assert broken in prove(SMALL, seed=0).broken

"""The gap before the second token, small: its parts are those of the clients' own gaps."""

from __future__ import annotations

import pytest

from tests.benchmarks.virtual_cluster.figures import second_token_gaps
from tests.proofs.gap import GapLoad, parts_of, prove


def test_the_gap_is_the_bytes_and_a_few_steps() -> None:
    assert prove([1, 16], link=40e9, seed=0, turns=3).broken == []


def test_the_parts_are_those_of_the_gaps_that_clients_see() -> None:
    cluster = GapLoad(rows=16, link=40e9, turns=3).run(seed=0)
    gaps = sorted(map(sum, zip(*parts_of(cluster).values(), strict=True)))
    assert gaps == pytest.approx(second_token_gaps(cluster.records))


def test_a_slow_link_is_seen_in_the_fetch() -> None:
    load = GapLoad(rows=8, link=1e9, turns=2)
    parts = parts_of(load.run(seed=0))
    assert min(parts["fetch"]) >= load.fetch_seconds
    assert max(parts["first_step"]) < load.fetch_seconds

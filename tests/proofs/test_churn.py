"""Churn, small: every request ends, and a mistake leaves some of them hanging."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.proofs.churn import LEAVES, ChurnSize, prove
from tests.simulation.mistakes.mutations import mutated

SMALL = replace(ChurnSize().scaled(0.03), seconds=180.0, routers=2)


def test_workers_come_and_go_and_every_request_ends_soon_or_well() -> None:
    result = prove(SMALL, seed=0)
    fleet = result.seen["fleet"]
    assert isinstance(fleet, dict)
    assert fleet.keys() >= set(LEAVES), "a way of leaving never occurred"
    assert result.seen["… and why"], "nothing was refused"
    assert result.seen["streams continued elsewhere"], "no stream ran on a worker that left"
    assert result.seen["streams migrated"], "no stream left its worker in time"
    assert result.broken == []


@pytest.mark.long
def test_requests_that_their_worker_has_forgotten_hang() -> None:
    with mutated("requests of a lost worker are not tried again"):
        assert "hung" in prove(SMALL, seed=0).broken

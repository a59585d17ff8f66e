"""The proofs with real processes, small: workers are lost, no token differs, and nobody waits in vain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.deployments.aggregated import needs_prefill
from tests.integration.deployments.deployment import LocalDeployment, deployment
from tests.proofs import real_cascade, real_churn
from tests.proofs.churn import LEAVES
from tests.proofs.real_cascade import RealCascadeSize
from tests.proofs.real_churn import RealChurnSize
from tests.proofs.real_clients import ClientRecord, different_tokens

PAGES = {role: {"kvPages": 400} for role in ("prefill", "decode")}


@pytest.fixture(scope="module")
def fleet() -> Iterator[LocalDeployment]:
    """Two workers of each role."""
    config = {**PAGES, "router": {"ttftTargetSeconds": 2}}
    with deployment("--prefill", "2", "--decode", "2", config=config) as running:
        yield running


@needs_prefill("no prefill worker can be killed")
def test_three_worker_processes_are_killed_and_no_request_fails_nor_does_a_token_differ(
    fleet: LocalDeployment,
) -> None:
    size = RealCascadeSize(sessions=6, victims=("decode", "prefill", "decode"), between_seconds=4.0)
    result = real_cascade.prove(fleet, size, seed=0)
    attempts = result.seen["attempts after the first, by cause"]
    assert isinstance(attempts, dict)
    assert attempts.get("lost_decode"), "no stream ran on a decode worker that was killed"
    waits = ("longest pause", "first token")  # a machine may be busy
    assert [name for name in result.broken if not name.startswith(waits)] == []


@needs_prefill("no prefill worker comes and goes")
@pytest.mark.long
def test_worker_processes_come_and_go_and_every_request_ends_well_or_says_why(fleet: LocalDeployment) -> None:
    size = RealChurnSize(leaves=6, requests=60, seconds=15.0, output=(40, 160))
    result = real_churn.prove(fleet, size, seed=0)
    left = result.seen["fleet"]
    assert isinstance(left, dict)
    assert all(left[how] for how in LEAVES), "a way of leaving never occurred"
    attempts = result.seen["attempts after the first, by cause"]
    assert isinstance(attempts, dict)
    assert attempts.get("lost_decode"), "no request lost its worker"
    assert [name for name in result.broken if not name.startswith("longest until a refusal")] == []


def test_what_went_wrong_is_counted() -> None:
    def record(**seen: object) -> ClientRecord:
        return ClientRecord(1, [1], 2, **seen)  # type: ignore[arg-type]

    whole = record(token_ids=[5, 6], finish_reason="length")
    short = record(token_ids=[5], finish_reason="length")
    cut = record(token_ids=[5])
    failed = record(token_ids=[5], error="lost")
    refused = record(status=429, error="no room")
    assert [each.completed for each in (whole, short, cut, failed, refused)] == [True, *[False] * 4]
    assert [each.broken for each in (whole, cut, failed, refused)] == [False, True, False, False]
    assert [each.refused for each in (whole, cut, failed, refused)] == [False, False, False, True]
    doubled = record(token_ids=[5, 5], finish_reason="length")
    assert different_tokens([whole, doubled], [whole, whole]) == 1

"""The engine with the TLS transport: answers, kills and migrations as over NIXL, and metrics that name it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.integration.deployments.deployment import LocalDeployment, deployment
from tests.integration.deployments.observing import continuations, linked_workers
from tests.integration.deployments.ranked import MEETING_PORTS, followers_of
from tests.integration.deployments.streams import StreamedAnswer, crowd
from tests.integration.faults.conftest import PROMPTS, SAMPLED
from tests.integration.faults.test_draining import drain_a_decode_worker, what_happened
from tests.integration.faults.test_faults import disturb, kill
from tests.integration.transfer.test_kv_strangers import listening_ports
from tests.waiting import until

OVER_TLS = {"kvPages": 400, "kvTransport": "tls"}


@pytest.fixture(scope="module")
def two_over_tls() -> Iterator[LocalDeployment]:
    """One prefill and two decode workers."""
    with deployment("--decode", "2", config={"prefill": OVER_TLS, "decode": OVER_TLS}) as running:
        yield running


def test_answers_are_those_of_nixl_and_come_over_tls(
    two_over_tls: LocalDeployment, undisturbed_crowd: list[StreamedAnswer]
) -> None:
    assert crowd(two_over_tls.url, PROMPTS, 8, **SAMPLED) == undisturbed_crowd
    assert two_over_tls.total("decode", "segue_kv_fetched_bytes_total") > 0
    assert continuations(two_over_tls) == 0, "nothing was computed anew in place of a fetch"


def test_metrics_name_the_transport(two_over_tls: LocalDeployment) -> None:
    # at least 1 MiB of pages: such a fetch measures its link
    long_prompt = ["Once upon a time there was " * 60]
    crowd(two_over_tls.url, long_prompt * 4, 4, max_tokens=2)
    named = [
        name
        for worker in two_over_tls.processes("decode")
        for name in two_over_tls.metrics(worker)
        if name.startswith("segue_kv_link_bytes_per_second")
    ]
    assert named
    assert all("transport=tls" in name for name in named)


def test_workers_have_three_ports_and_none_is_of_ucx(two_over_tls: LocalDeployment) -> None:
    """Probes, links, pages over TLS; of another rank pages alone. Ranks meet at one more each."""
    for worker in (*two_over_tls.processes("prefill"), *two_over_tls.processes("decode")):
        assert len(listening_ports(worker.pid)) == 3 + MEETING_PORTS
        for follower in followers_of(worker.pid):
            assert len(listening_ports(follower)) == 1 + MEETING_PORTS


def test_a_killed_decode_worker_only_pauses_the_stream(
    two_over_tls: LocalDeployment, undisturbed: str
) -> None:
    before = continuations(two_over_tls)
    answer = asyncio.run(disturb(two_over_tls, pieces=20, with_worker=kill))
    assert answer == StreamedAnswer(undisturbed, "length", SAMPLED["max_tokens"])
    assert continuations(two_over_tls) == before + 1
    until(lambda: linked_workers(two_over_tls) == 3, 60, "all workers' readiness")


def test_streams_migrate_from_a_draining_worker_by_reads_over_tls(
    two_over_tls: LocalDeployment, undisturbed_crowd: list[StreamedAnswer]
) -> None:
    until(lambda: linked_workers(two_over_tls) == 3, 60, "all workers' readiness")
    tried_again = continuations(two_over_tls)
    migrated = two_over_tls.total("router", "segue_migrations_total{cause=drain,outcome=migrated}")
    answers, held, _ = asyncio.run(drain_a_decode_worker(two_over_tls))
    assert answers == undisturbed_crowd
    assert held > 0
    assert (
        two_over_tls.total("router", "segue_migrations_total{cause=drain,outcome=migrated}")
        == migrated + held
    )
    assert continuations(two_over_tls) == tried_again, what_happened(two_over_tls)
    until(lambda: not two_over_tls.held(), 10, "everything given back")

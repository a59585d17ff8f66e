"""The verdict on planted bottlenecks, each in a virtual deployment."""

from __future__ import annotations

import pytest

from shared.local.bottleneck import LiveVerdict, Scrape, verdict
from tests.benchmarks.virtual_cluster.bottlenecks import IDLE, PLANTED
from tests.benchmarks.virtual_cluster.cluster import START_SECONDS, ClusterShape, VirtualCluster
from tests.benchmarks.virtual_cluster.scrapes import ScrapedCluster

FIRST_AT = START_SECONDS + 10


def judged(shape: ClusterShape) -> LiveVerdict:
    """The verdict on a virtual deployment, ten seconds after its first request."""
    return verdict(*ScrapedCluster(VirtualCluster(shape, seed=0)).scrapes(FIRST_AT))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bottleneck_is_named(name: str) -> None:
    found = judged(PLANTED[name].shape)
    assert found.cause == PLANTED[name].cause, found


def test_an_idle_deployment_is_called_idle() -> None:
    assert judged(IDLE).cause == "idle"


def test_a_slow_pod_is_named_with_its_cause() -> None:
    assert "decode-1" in judged(PLANTED["one of three decode pods is slow"].shape).turn


def test_the_routers_metrics_alone_name_a_full_decode() -> None:
    scrapes = ScrapedCluster(VirtualCluster(PLANTED["more streams than slots"].shape, seed=0)).scrapes(
        FIRST_AT
    )
    before, after = (Scrape(each.seconds, {"router-0": each.processes["router-0"]}) for each in scrapes)
    assert verdict(before, after).cause == "decode"

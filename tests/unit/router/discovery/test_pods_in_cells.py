"""Which workers of a large fleet discovery dials: those of this router's cells, and those it has links to."""

from __future__ import annotations

from collections import Counter

from router.discovery.known_pods import DialPod, HangUpPod, KnownPods, Listed, Observation, TimePassed
from router.discovery.pods_of_slices import ABSENT_SECONDS, Pod, PodSlice


def fleet(prefill: int, decode: int, routers: int, *, ready: bool = True) -> Listed:
    """Each pod in a slice of its own; the routers are router-0, router-1, …"""
    workers = {"prefill": prefill, "decode": decode}
    pods = [
        Pod(f"{role}-{number}", f"{role}-{number}", role, f"tcp://{role}.{number}:8002", ready)
        for role, count in workers.items()
        for number in range(count)
    ]
    peers = [Pod(f"u{n}", f"router-{n}", "router", f"http://10.1.0.{n}:8003", True) for n in range(routers)]
    return Listed(tuple(PodSlice(each.uid, (each,)) for each in [*pods, *peers]))


def dialed_by(pods: KnownPods, observation: Observation) -> set[str]:
    return {each.worker.pod for each in pods.observe(observation, 0.0) if isinstance(each, DialPod)}


def test_routers_divide_a_large_fleet_and_two_of_them_dial_each_worker() -> None:
    routers = [KnownPods(0.0, f"router-{number}", cell_workers_max=8) for number in range(6)]
    dialed = [dialed_by(pods, fleet(6, 18, 6)) for pods in routers]
    assert [len(each) for each in dialed] == [8] * 6
    times = Counter(name for each in dialed for name in each)
    assert len(times) == 24
    assert set(times.values()) == {2}
    assert routers[0].pods_by_state == {"dialed": 8, "elsewhere": 16}


def test_a_fleet_no_larger_than_a_cell_is_dialed_whole_by_every_router() -> None:
    for number in range(6):
        assert len(dialed_by(KnownPods(0.0, f"router-{number}"), fleet(24, 40, 6))) == 64


def test_a_link_stays_when_its_worker_comes_to_be_of_another_cell() -> None:
    pods = KnownPods(0.0, "router-0", cell_workers_max=8)
    before = dialed_by(pods, fleet(4, 4, 6))
    assert len(before) == 8
    changes = pods.observe(fleet(6, 18, 6), 0.0)
    assert not [change for change in changes if isinstance(change, HangUpPod)]
    assert pods.pods_by_state["dialed"] >= 8


def test_a_router_that_is_left_alone_dials_all_workers() -> None:
    pods = KnownPods(0.0, "router-0", cell_workers_max=8)
    before = dialed_by(pods, fleet(6, 18, 6))
    after = dialed_by(pods, fleet(6, 18, 1))
    # the other routers are absent, not gone, until `ABSENT_SECONDS` have passed
    late = {
        each.worker.pod for each in pods.observe(TimePassed(), ABSENT_SECONDS) if isinstance(each, DialPod)
    }
    assert len(before | after | late) == 24

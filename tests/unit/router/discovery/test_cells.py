"""How a large fleet is divided among routers: nobody is left out, no cell is too large, and little moves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.discovery.known_pods import (
    ROUTERS_MIN,
    DialPod,
    HangUpPod,
    KnownPods,
    Listed,
    Observation,
    TimePassed,
    cells_of,
    divide,
    served_cells,
    workers_of,
)
from router.discovery.pods_of_slices import ABSENT_SECONDS, Pod, PodSlice

SIZE_MAX = 8
COUNTS = st.integers(1, 60)
SIZES = st.integers(2, 64)


def named(role: str, count: int) -> list[str]:
    return [f"{role}-{number}" for number in range(count)]


def dialed(
    prefill: list[str], decode: list[str], routers: list[str], size_max: int
) -> dict[str, frozenset[str]]:
    return {router: workers_of(router, routers, prefill, decode, size_max) for router in routers}


@given(COUNTS, COUNTS, SIZES)
def test_every_cell_has_both_roles_and_no_more_workers_than_allowed(
    prefill: int, decode: int, size_max: int
) -> None:
    count = cells_of(prefill, decode, size_max)
    shares = [Counter(divide(named(role, n), count).values()) for role, n in (("p", prefill), ("d", decode))]
    assert all(set(share) == set(range(count)) for share in shares)
    assert all(max(share.values()) - min(share.values()) <= 1 for share in shares)
    if count < min(prefill, decode):  # else a cell more would have no worker of one role
        assert all(sum(share[cell] for share in shares) <= size_max for cell in range(count))
    if prefill + decode <= size_max:
        assert count == 1


@given(COUNTS, st.integers(1, 12), SIZES)
def test_decode_workers_alone_are_divided_by_themselves(decode: int, routers: int, size_max: int) -> None:
    count = cells_of(0, decode, size_max)
    assert count == min(decode, max(1, -(-decode // size_max)))
    found = dialed([], named("d", decode), named("r", routers), size_max)
    assert {name for names in found.values() for name in names} == set(named("d", decode))


@given(COUNTS, COUNTS, st.integers(1, 12), SIZES)
def test_two_routers_dial_each_worker_and_every_router_dials_both_roles(
    prefill: int, decode: int, routers: int, size_max: int
) -> None:
    workers = named("p", prefill), named("d", decode)
    found = dialed(*workers, named("r", routers), size_max)
    times = Counter(name for names in found.values() for name in names)
    assert set(times) == {*workers[0], *workers[1]}
    assert min(times.values()) >= min(ROUTERS_MIN, routers)
    for names in found.values():
        assert names & set(workers[0])
        assert names & set(workers[1])


@given(st.integers(1, 20), st.integers(2, 40))
def test_a_router_serves_one_cell_where_there_are_two_routers_for_each(count: int, more: int) -> None:
    cells = served_cells(named("r", ROUTERS_MIN * count + more), count)
    assert all(len(each) == 1 for each in cells.values())


@given(COUNTS, COUNTS, st.integers(1, 12), SIZES, st.randoms(use_true_random=False))
def test_the_order_in_which_names_are_known_changes_nothing(
    prefill: int, decode: int, routers: int, size_max: int, random: object
) -> None:
    first = dialed(named("p", prefill), named("d", decode), named("r", routers), size_max)
    mixed = [named(role, n) for role, n in (("p", prefill), ("d", decode), ("r", routers))]
    for names in mixed:
        random.shuffle(names)  # type: ignore[attr-defined]
    assert dialed(mixed[0], mixed[1], mixed[2], size_max) == first


@given(st.integers(20, 120), st.integers(2, 10), st.integers(0, 1000))
def test_a_worker_that_is_replaced_moves_two_others_of_each_cell_at_most(
    workers: int, count: int, serial: int
) -> None:
    names = named("d", workers)
    before = divide(names, count)
    replaced = names[serial % workers]
    after = divide([name for name in names if name != replaced] + [f"new-{serial}"], count)
    moved = [name for name in names if name != replaced and after[name] != before[name]]
    assert len(moved) <= 2 * count


def test_in_a_rolling_upgrade_of_a_large_fleet_a_pod_that_is_replaced_moves_three_others() -> None:
    names, count = named("d", 400), 10
    cells, moved = divide(names, count), 0
    for number in range(100):
        names = [*names[1:], f"new-{number}"]
        after = divide(names, count)
        moved += sum(after[name] != cells[name] for name in names[:-1])
        cells = after
    assert moved <= 3.5 * 100


# ---- which workers of a large fleet discovery dials: those of this router's cells, and those it has links to ---------


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

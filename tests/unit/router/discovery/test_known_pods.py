"""The core of discovery: which observation of the API server dials, hangs up, and what it notes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.discovery.known_pods import (
    Change,
    Changed,
    Denied,
    DialPod,
    HangUpPod,
    KnownPods,
    Listed,
    Observation,
    RedialPod,
    Removed,
    TimePassed,
    Unreachable,
    Watching,
)
from router.discovery.pods_of_slices import ABSENT_SECONDS, Pod, PodSlice
from router.discovery.worker_address import WorkerAddress
from shared.batch.effects import Note

AWAY = Unreachable("list of endpointslices: refused")
FORBIDDEN = Denied("watch", "prod", "endpointslices is forbidden")


def pod(uid: str, *, ready: bool = True, terminating: bool = False, url: str = "") -> Pod:
    return Pod(uid, f"decode-{uid}", "decode", url or f"tcp://10.0.0.{uid}:8002", ready, terminating)


def listed(*pods: Pod) -> Listed:
    """Each in a slice of its own."""
    return Listed(tuple(PodSlice(each.uid, (each,)) for each in pods))


def changed(pod: Pod) -> Changed:
    return Changed(PodSlice(pod.uid, (pod,)))


def worker(uid: str) -> WorkerAddress:
    return WorkerAddress("decode", f"tcp://10.0.0.{uid}:8002", f"decode-{uid}")


def gone(pods: KnownPods, since: float = 0.0) -> list[Change]:
    """What follows when a pod has been absent for so long that it is gone."""
    return pods.observe(TimePassed(), since + ABSENT_SECONDS)


def known(*observations: Observation) -> KnownPods:
    pods = KnownPods(0.0)
    for observation in observations:
        pods.observe(observation, 0.0)
    return pods


def notes_of(pods: KnownPods, *observations: Observation, now: float = 0.0) -> list[Note]:
    changes = [change for observation in observations for change in pods.observe(observation, now)]
    return [change for change in changes if isinstance(change, Note)]


def test_only_ready_pods_are_dialed_and_each_once() -> None:
    pods = known()
    both = listed(pod("1"), pod("2", ready=False))
    assert pods.observe(both, 0.0) == [DialPod(worker("1"))]
    assert pods.observe(both, 0.0) == []
    assert pods.observe(changed(pod("1")), 0.0) == []
    assert pods.observe(changed(pod("2")), 0.0) == [DialPod(worker("2"))]


def test_pods_of_other_components_are_not_looked_at() -> None:
    router = replace(pod("1"), role="router")
    pods = known()
    assert pods.observe(listed(router), 0.0) == []
    assert pods.observe(changed(router), 0.0) == []
    assert sum(pods.pods_by_state.values()) == 0


def test_routers_are_known_by_name_ready_or_not_and_never_dialed() -> None:
    one, other = (
        Pod(uid, f"router-{uid}", "router", f"http://10.0.0.{uid}:8000", ready=uid == "1") for uid in "12"
    )
    pods = known()
    assert pods.observe(listed(one, other, pod("3")), 0.0) == [DialPod(worker("3"))]
    assert pods.routers == {"router-1": "http://10.0.0.1:8000", "router-2": "http://10.0.0.2:8000"}
    assert pods.routers_ready == 1
    pods.observe(changed(replace(other, ready=True)), 0.0)
    assert pods.routers_ready == 2
    pods.observe(changed(replace(other, ready=True, terminating=True)), 0.0)
    assert pods.routers_ready == 1
    assert pods.observe(Removed("1"), 0.0) == []
    assert pods.observe(changed(replace(other, url="")), 0.0) == []
    assert gone(pods) == []
    assert pods.routers == {}


def test_a_pod_that_is_relabelled_away_from_its_role_is_gone() -> None:
    pods = known(listed(pod("1")))
    assert pods.observe(changed(replace(pod("1"), role="")), 0.0) == [HangUpPod(worker("1"))]


def test_a_pod_that_stops_being_ready_keeps_its_link() -> None:
    pods = known(listed(pod("1")))
    assert pods.observe(changed(pod("1", ready=False)), 0.0) == []
    assert pods.observe(listed(pod("1", ready=False)), 0.0) == []
    assert pods.pods_by_state == {"dialed": 1}


def test_a_pod_that_is_ready_again_is_dialed_without_rest() -> None:
    pods = known(listed(pod("1"), pod("2")), changed(pod("1", ready=False)))
    assert pods.observe(changed(pod("1")), 0.0) == [RedialPod(worker("1"))]
    assert pods.observe(changed(pod("1")), 0.0) == []
    pods.observe(listed(pod("1", ready=False), pod("2", ready=False)), 0.0)
    assert pods.observe(listed(pod("1"), pod("2", ready=False)), 0.0) == [RedialPod(worker("1"))]


def terminating_note(uid: str) -> Note:
    fields = {"pod": f"decode-{uid}", "worker_role": "decode", "address": worker(uid).url}
    return Note("discovery.terminating", fields)


def test_a_terminating_pod_keeps_its_link_until_it_has_gone_and_is_noted_once() -> None:
    pods = known(listed(pod("1")))
    terminating = pod("1", terminating=True)
    assert pods.observe(changed(terminating), 0.0) == [terminating_note("1")]
    assert pods.observe(changed(terminating), 0.0) == []
    assert pods.observe(changed(replace(terminating, ready=False)), 0.0) == []
    assert pods.pods_by_state == {"terminating": 1}
    assert pods.observe(Removed("1"), 0.0) == []
    assert gone(pods) == [HangUpPod(worker("1"))]
    assert pods.observe(Removed("1"), 0.0) == []


def test_a_pod_first_seen_while_it_terminates_is_never_dialed() -> None:
    pods = known()
    terminating = pod("1", terminating=True)
    assert pods.observe(listed(terminating), 0.0) == []
    assert pods.observe(changed(terminating), 0.0) == []
    assert pods.observe(Removed("1"), 0.0) == []


def test_a_list_mends_whatever_the_watch_missed() -> None:
    pods = known(listed(pod("1"), pod("2"), pod("3")))
    mended = listed(pod("2"), pod("3", terminating=True), pod("4"))
    assert pods.observe(mended, 0.0) == [DialPod(worker("4")), terminating_note("3")]
    assert gone(pods) == [HangUpPod(worker("1"))]


def test_a_pod_with_a_new_address_is_dialed_there() -> None:
    pods = known(listed(pod("1")))
    moved = pod("1", url="tcp://10.0.0.9:8002")
    there = WorkerAddress("decode", "tcp://10.0.0.9:8002", "decode-1")
    assert pods.observe(changed(moved), 0.0) == [HangUpPod(worker("1")), DialPod(there)]


def test_an_address_given_to_another_pod_stays_dialed() -> None:
    pods = known(listed(pod("1")))
    successor = pod("2", url="tcp://10.0.0.1:8002")
    there = WorkerAddress("decode", "tcp://10.0.0.1:8002", "decode-2")
    assert pods.observe(changed(successor), 0.0) == [RedialPod(there)]
    assert pods.observe(Removed("1"), 0.0) == []
    assert gone(pods) == []
    assert pods.observe(Removed("2"), 10.0) == []
    assert gone(pods, 10.0) == [HangUpPod(there)]


def test_a_ready_pod_without_the_port_is_noted_once() -> None:
    portless = replace(pod("1"), url="")
    pods = KnownPods(0.0)
    [note] = notes_of(pods, listed(portless))
    assert (note.event, note.fields["pod"], note.level) == ("discovery.unusable", "decode-1", "warning")
    assert notes_of(pods, listed(portless)) == []


def test_a_pod_that_no_slice_names_keeps_its_link_for_a_while_and_comes_back_to_it() -> None:
    pods = known(listed(pod("1"), pod("2")))
    assert pods.observe(listed(), 10.0) == []
    assert pods.pods_by_state == {"absent": 2}
    assert pods.refresh_at == 10.0 + ABSENT_SECONDS
    assert pods.observe(TimePassed(), 10.0 + ABSENT_SECONDS / 2) == []
    assert pods.observe(changed(pod("2")), 11.0) == [RedialPod(worker("2"))]
    assert gone(pods, 10.0) == [HangUpPod(worker("1"))]
    assert pods.pods_by_state == {"dialed": 1}
    assert pods.refresh_at is None


def test_a_pod_in_two_slices_is_one_until_it_has_left_both() -> None:
    stale = replace(pod("1"), ready=False)
    pods = known(Listed((PodSlice("old", (stale, pod("2"))),)))
    assert pods.observe(Changed(PodSlice("new", (pod("1"),))), 0.0) == [DialPod(worker("1"))]
    assert pods.observe(Changed(PodSlice("old", (pod("2"),))), 0.0) == []
    assert pods.pods_by_state == {"dialed": 2}
    assert pods.observe(Removed("new"), 0.0) == []
    assert gone(pods) == [HangUpPod(worker("1"))]


def test_a_pod_with_two_addresses_is_dialed_at_its_ipv4_address_alone() -> None:
    at_v6 = pod("1", url="tcp://[fd00::1]:8002")
    pods = known()
    both = Listed((PodSlice("v6", (at_v6,)), PodSlice("v4", (pod("1"),))))
    assert pods.observe(both, 0.0) == [DialPod(worker("1"))]
    assert pods.observe(Changed(PodSlice("v6", (at_v6,))), 0.0) == []


# ---- the API server --------------------------------------------------------------------------------------------


def test_ready_once_a_list_and_a_watch_have_worked_also_without_any_pod() -> None:
    pods = known(Listed(()))
    assert not pods.ready
    pods.observe(Watching(), 0.0)
    assert pods.ready
    assert pods.reachable


def test_an_outage_changes_no_link_and_is_one_line_until_it_ends() -> None:
    pods = known(listed(pod("1")), Watching())
    [away] = pods.observe(AWAY, 10.0)
    assert isinstance(away, Note)
    assert (away.event, away.fields["doing"]) == (
        "discovery.unreachable",
        "serving with the last known fleet",
    )
    assert pods.observe(AWAY, 15.0) == pods.observe(AWAY, 20.0) == []
    assert (pods.ready, pods.reachable, pods.age_seconds(20.0)) == (True, False, 20.0)
    assert pods.observe(listed(pod("1")), 130.0) == []
    assert pods.observe(Watching(), 130.0) == [Note("discovery.back", {"pods": 1, "seconds": 120.0})]
    assert (pods.reachable, pods.age_seconds(131.0)) == (True, 1.0)


def test_a_denial_names_what_is_missing_and_ends_with_the_permission() -> None:
    pods = KnownPods(0.0)
    [denied] = notes_of(pods, listed(pod("1")), FORBIDDEN, listed(pod("1")), FORBIDDEN)
    assert not pods.ready
    assert pods.waiting_for == "permission to watch endpointslices in the namespace prod"
    assert (denied.event, denied.level) == ("discovery.denied", "error")
    assert [denied.fields[name] for name in ("verb", "resource", "namespace")] == [
        "watch",
        "endpointslices",
        "prod",
    ]
    pods.observe(Watching(), 0.0)
    assert pods.ready


def test_a_permission_withdrawn_from_a_serving_router_leaves_it_ready() -> None:
    pods = known(listed(pod("1")), Watching())
    assert [note.event for note in notes_of(pods, FORBIDDEN)] == ["discovery.denied"]
    assert (pods.ready, pods.reachable) == (True, False)


def test_every_change_of_trouble_is_a_line_of_its_own() -> None:
    trouble = (AWAY, AWAY, FORBIDDEN, FORBIDDEN, AWAY)
    notes = notes_of(KnownPods(0.0), *trouble, Listed(()), Watching(), Watching())
    events = [note.event.removeprefix("discovery.") for note in notes]
    assert events == ["unreachable", "denied", "unreachable", "synced"]
    assert notes[0].fields["doing"] == "not ready until it answers"


# ---- whatever comes --------------------------------------------------------------------------------------------

UIDS = st.sampled_from("12345")
PODS = st.builds(
    Pod,
    uid=UIDS,
    name=st.just("a"),
    role=st.sampled_from(["prefill", "decode", "router"]),
    url=st.sampled_from(["", "tcp://a:1", "tcp://b:1", "tcp://c:1"]),
    ready=st.booleans(),
    terminating=st.booleans(),
)
SLICES = st.builds(
    PodSlice,
    name=st.sampled_from("abc"),
    pods=st.lists(PODS, unique_by=lambda each: each.uid, max_size=4).map(tuple),
)
LISTS = st.lists(SLICES, unique_by=lambda each: each.name).map(lambda slices: Listed(tuple(slices)))
NAMES = st.sampled_from("abc")
OBSERVATIONS = st.lists(
    st.tuples(
        st.one_of(
            LISTS,
            SLICES.map(Changed),
            NAMES.map(Removed),
            st.just(AWAY),
            st.just(FORBIDDEN),
            st.just(Watching()),
            st.just(TimePassed()),
        ),
        st.sampled_from([0.0, 1.0, ABSENT_SECONDS]),
    )
)


def seen_after(seen: dict[str, PodSlice], observation: Observation) -> dict[str, PodSlice]:
    """The slices that exist, as somebody keeps them who forgets at once."""
    match observation:
        case Listed(slices):
            return {each.name: each for each in slices}
        case Changed(put):
            return seen | {put.name: put}
        case Removed(name):
            return {key: each for key, each in seen.items() if key != name}
    return seen


def workers_of(seen: dict[str, PodSlice]) -> dict[str, bool]:
    """The address of each worker, and whether it may be dialed anew; the first address by name where it has several."""
    named: dict[str, list[Pod]] = {}
    for each in (pod for found in seen.values() for pod in found.pods):
        named.setdefault(each.uid, []).append(each)
    found: dict[str, bool] = {}
    for pods in named.values():
        best = min(pods, key=lambda pod: (not pod.url, pod.url, pod.role))
        if best.url and best.role != "router":
            fresh = any(pod.ready for pod in pods) and not any(pod.terminating for pod in pods)
            found[best.url] = found.get(best.url, False) or fresh
    return found


def apply(changes: list[Change], dialed: set[str]) -> None:
    """What the links do; in pairs, so that nothing is dialed twice or hung up that was not dialed."""
    for change in changes:
        if isinstance(change, DialPod):
            assert change.worker.url not in dialed
            dialed.add(change.worker.url)
        elif isinstance(change, HangUpPod):
            dialed.remove(change.worker.url)
        elif isinstance(change, RedialPod):
            assert change.worker.url in dialed


@given(OBSERVATIONS)
def test_whatever_is_observed_the_links_are_those_of_pods_that_may_be_reached(
    observations: list[tuple[Observation, float]],
) -> None:
    pods, dialed, seen, now = KnownPods(0.0), set[str](), dict[str, PodSlice](), 0.0
    for observation, seconds in observations:
        now += seconds
        apply(pods.observe(TimePassed(), now), dialed)
        before = set(dialed)
        changes = pods.observe(observation, now)
        apply(changes, dialed)
        if isinstance(observation, Unreachable | Denied):
            assert all(isinstance(change, Note) for change in changes)
        seen = seen_after(seen, observation)
        workers = workers_of(seen)
        wanted = {url for url, fresh in workers.items() if fresh}
        assert wanted <= dialed <= wanted | before
        assert pods.observe(Listed(tuple(seen.values())), now) == []
    assert (pods.refresh_at is None) or pods.refresh_at > now
    apply(gone(pods, now), dialed)
    assert dialed <= workers_of(seen).keys()
    apply(pods.observe(Listed(()), now), dialed)
    apply(gone(pods, now + ABSENT_SECONDS), dialed)
    assert dialed == set()


@given(LISTS, LISTS)
def test_events_lead_where_a_list_leads(first: Listed, second: Listed) -> None:
    by_list, by_events = known(first, second), known(first)
    for each in second.slices:
        by_events.observe(Changed(each), 0.0)
    for each in first.slices:
        if each.name not in {other.name for other in second.slices}:
            by_events.observe(Removed(each.name), 0.0)
    gone(by_list)
    gone(by_events)
    assert by_list.routers.keys() == by_events.routers.keys()
    assert sum(by_list.pods_by_state.values()) == sum(by_events.pods_by_state.values())
    assert by_events.observe(second, 0.0) == []

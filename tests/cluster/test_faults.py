"""No stream is lost: pods are scaled, deleted, killed, frozen and rolled while at least eight streams run.

Each time every stream ends exactly once with exactly the tokens of the undisturbed run, and nothing is held afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

import httpx2
import pytest

from tests.cluster import node
from tests.cluster.conftest import LATER, LONG, LONGEST, NOTES, STREAMS, Faulted
from tests.cluster.kubernetes import ClusterPod
from tests.cluster.load import LOOK_SECONDS_MAX, STREAMS_AT_FAULT_MIN, Plan, run_streams
from tests.cluster.release import COMPONENTS, HelmRelease
from tests.waiting import until

pytestmark = pytest.mark.timeout(600, func_only=True)  # the first one's set-up starts a cluster

LOCAL_PROMPTS, EXTEND_TOKENS = "segue_local_prompts_total", "segue_extend_tokens_total"


@pytest.fixture
def two_decode_pods(release: HelmRelease) -> None:
    release.scale("decode", 2)
    release.wait_for("decode", 2)


@pytest.mark.usefixtures("two_decode_pods")
def test_a_decode_pod_that_is_scaled_away_migrates_its_streams_by_their_pages(
    release: HelmRelease, faulted: Faulted, pytestconfig: pytest.Config
) -> None:
    """With a thousand tokens to come: all migrate, none is recomputed, and the process exits before they end."""
    migrated, again = migrations(release), continuations(release)
    before = release.cluster.pods("decode")
    victim: list[ClusterPod] = []
    ended: dict[str, float] = {}

    def scale_down() -> None:
        running = {pod.uid: node.process_of(pod) for pod in before}
        began = monotonic()
        release.scale("decode", 1)
        until(lambda: terminating(release, before), 30, "a pod that terminates")
        victim.extend(terminating(release, before))
        until(lambda: not node.is_running(running[victim[0].uid]), 30, "the end of its process")
        ended.update(after_seconds=monotonic() - began, at=monotonic())

    report = faulted("`kubectl scale` decode 2 → 1", scale_down, tokens=LONGEST)
    ways = {stream.rid: Way.of(release.debug(stream.rid)) for stream in report.streams}
    began_there = [stream for stream in report.streams if ways[stream.rid].began_on(victim[0])]
    held = [stream for stream in began_there if report.to_come(stream) >= 1000]
    assert len(held) >= STREAMS_AT_FAULT_MIN
    assert all(ways[stream.rid].migrations == 1 for stream in held)
    assert all(way.migrations < len(way.decode) for way in ways.values())
    assert all(way.attempts == 1 for way in ways.values())
    assert migrations(release) - migrated == sum(way.migrations for way in ways.values())
    assert continuations(release) == again
    assert ended["after_seconds"] < 10
    note = f"{len(held)} migrated with 1,000 tokens to come; the process ended after {ended['after_seconds']:.1f} s"
    pytestconfig.stash.setdefault(NOTES, []).append(note)
    assert ended["at"] < min(stream.ended_at for stream in held)
    release.wait_for("decode", 1)


@dataclass(frozen=True)
class Way:
    """Where a request went."""

    decode: tuple[str, ...]
    migrations: int
    attempts: int

    def began_on(self, pod: ClusterPod) -> bool:
        """Whether its first decode worker was that pod."""
        return self.decode[0].startswith(f"{pod.name}/")

    @classmethod
    def of(cls, shown: dict[str, Any]) -> Way:
        workers = tuple(visit["worker"] for visit in shown["workers"] if visit["role"] == "decode")
        return cls(workers, shown["migrations"], shown["attempts"])


def test_decode_is_scaled_from_one_to_three_and_back(release: HelmRelease, faulted: Faulted) -> None:
    def scale() -> None:
        release.scale("decode", 3)
        release.wait_for("decode", 3)
        before = release.cluster.pods("decode")
        release.scale("decode", 1)
        until(lambda: len(terminating(release, before)) == 2, 30, "two that terminate")

    faulted("`kubectl scale` decode 1 → 3 → 1", scale, tokens=LONG)
    release.wait_for("decode", 1)


def test_prefill_is_scaled_to_none_and_back(
    release: HelmRelease, faulted: Faulted, undisturbed: dict[Plan, str]
) -> None:
    """Decode computes the prompts while no prefill pod is there, and none when one is there again."""

    def scale(replicas: int) -> None:
        release.scale("prefill", replicas)
        release.wait_for("prefill", replicas)

    pods = release.cluster.pods("prefill")
    faulted("`kubectl scale` prefill 1 → 0", lambda: scale(0), pods, LONG)
    local = release.total("decode", LOCAL_PROMPTS)
    back = lambda: release.total("router", "segue_workers{worker_role=prefill}") == 1  # noqa: E731
    faulted("`kubectl scale` prefill 0 → 1", lambda: scale(1), tokens=LONG, struck=back)
    assert release.total("decode", LOCAL_PROMPTS) - local >= STREAMS[LONG]
    local, computed = release.total("decode", LOCAL_PROMPTS), release.total("prefill", EXTEND_TOKENS)
    for stream in run_streams(release.url, release.api_key, LATER).streams:
        assert stream.text == undisturbed[stream.plan]
    assert release.total("decode", LOCAL_PROMPTS) == local
    assert release.total("prefill", EXTEND_TOKENS) > computed


@pytest.mark.parametrize("component", ["decode", "prefill"])
def test_a_pod_is_deleted(release: HelmRelease, faulted: Faulted, component: str) -> None:
    pod = release.cluster.pods(component)[0]
    delete = lambda: release.cluster.kubectl("delete", "pod", pod.name, "--wait=false")  # noqa: E731
    faulted(f"`kubectl delete pod`, the only {component} pod", delete, [pod])
    release.wait_for(component, 1)


def test_a_decode_pod_is_deleted_by_force(release: HelmRelease, faulted: Faulted) -> None:
    pod = release.cluster.pods("decode")[0]
    flags = ("--wait=false", "--force", "--grace-period=0")
    delete = lambda: release.cluster.kubectl("delete", "pod", pod.name, *flags)  # noqa: E731
    faulted("… `--force --grace-period=0`, the only decode pod", delete, [pod])
    release.wait_for("decode", 1)


@pytest.mark.parametrize("component", ["decode", "prefill"])
def test_the_process_of_the_only_pod_is_killed(
    release: HelmRelease, faulted: Faulted, component: str
) -> None:
    pod = release.cluster.pods(component)[0]
    killed(faulted, f"SIGKILL, the only {component} pod", pod)
    release.wait_for(component, 1)
    assert release.cluster.pods(component)[0].restarts == pod.restarts + 1


@pytest.mark.usefixtures("two_decode_pods")
def test_one_of_two_decode_processes_is_killed(release: HelmRelease, faulted: Faulted) -> None:
    pod = release.cluster.pods("decode")[0]
    again = continuations(release)
    killed(faulted, "SIGKILL, one of two decode pods", pod)
    assert continuations(release) > again
    release.wait_for("decode", 2)


@pytest.mark.usefixtures("two_decode_pods")
def test_three_processes_are_killed_one_after_the_other(release: HelmRelease, faulted: Faulted) -> None:
    """The cascade: each goes once the one before is seen to be gone."""
    victims: list[ClusterPod] = []
    pids: list[int] = []
    again = continuations(release)

    def kill(component: str) -> None:
        linked = f"segue_workers{{worker_role={component}}}"
        before, killed = release.total("router", linked), {pod.uid for pod in victims}
        others = [pod for pod in release.cluster.pods(component) if pod.uid not in killed]
        victim = max(others, key=lambda pod: release.metrics(pod).get("segue_slots_used", 0.0))
        pids.append(node.process_of(victim))
        os.kill(pids[-1], signal.SIGKILL)
        victims.append(victim)
        lost = lambda: release.total("router", linked) < before or release.has_changed(victim)  # noqa: E731
        until(lost, 60, f"the loss of {victim.name}")

    def kill_in_turn() -> None:
        for component in ("decode", "prefill", "decode"):
            kill(component)

    faulted(
        "SIGKILL, a decode pod, the prefill pod, the other decode pod",
        kill_in_turn,
        victims,
        LONG,
        struck=lambda: len(pids) == 3 and not any(map(node.is_running, pids)),
    )
    assert continuations(release) > again
    release.wait_for("decode", 2)
    release.wait_for("prefill", 1)


@pytest.mark.usefixtures("two_decode_pods")
def test_a_decode_pod_is_out_of_memory(release: HelmRelease, faulted: Faulted) -> None:
    pod = release.cluster.pods("decode")[0]
    pid, again, kills = node.process_of(pod), continuations(release), node.oom_kills()
    let_memory_end = lambda: node.let_memory_end(release.cluster, pod)  # noqa: E731
    faulted("OOM kill, one of two decode pods", let_memory_end, [pod], LONG, lambda: not node.is_running(pid))
    # Not by the reason that the pod gives: it is OOMKilled only if containerd heard of the cause before the end.
    assert node.oom_kills() > kills
    assert "exitCode: 137" in release.cluster.kubectl("get", "pod", pod.name, "-o", "yaml")
    assert continuations(release) > again
    release.wait_for("decode", 2)


@pytest.mark.usefixtures("two_decode_pods")
def test_a_decode_pod_freezes_and_thaws(release: HelmRelease, faulted: Faulted) -> None:
    frozen: list[int] = []
    again = continuations(release)

    def thaw() -> None:
        with contextlib.suppress(ProcessLookupError):  # its liveness probe may have ended it
            os.kill(frozen[0], signal.SIGCONT)

    def freeze() -> None:
        frozen.append(node.process_of(release.busiest("decode")))
        os.kill(frozen[0], signal.SIGSTOP)
        until(lambda: release.total("router", "segue_workers{worker_role=decode}") == 1, 60, "its loss")
        thaw()

    try:
        faulted("SIGSTOP until its loss is noticed, one of two decode pods", freeze)
    finally:
        thaw()
    assert continuations(release) > again
    release.wait_for("decode", 2)
    release.scale("decode", 1)
    release.wait_for("decode", 1)


@pytest.mark.usefixtures("two_decode_pods")
def test_a_node_is_drained_by_evictions(release: HelmRelease, faulted: Faulted) -> None:
    """As `kubectl drain` asks: for every pod, and again where its budget has none to give until another is ready.

    There is one node, so it takes pods meanwhile.
    """
    release.scale("router", 2)
    release.wait_for("router", 2)
    before = release.cluster.pods()
    leaving, refused = {pod.name for pod in before}, set[str]()

    def drain() -> None:
        until(asked_of_all, 240, "the eviction of all pods", LOOK_SECONDS_MAX)

    def asked_of_all() -> bool:
        for name in sorted(leaving):
            answer = release.cluster.evict(name)
            (leaving.discard if not answer else refused.add)(name)
            assert "disruption budget" in answer or not answer, answer
        return not leaving

    gone = lambda: len(before) - len(leaving) >= len(COMPONENTS)  # noqa: E731
    faulted("all pods evicted, two by two", drain, tokens=LONGEST, struck=gone)
    assert {pod.component for pod in before if pod.name in refused} >= {"router", "decode"}
    assert not {pod.uid for pod in before} & {
        pod.uid for pod in release.cluster.pods() if not pod.terminating
    }
    for component in ("router", "decode"):  # as the tests behind it find them
        release.scale(component, 1)
    for component in ("router", "prefill", "decode"):
        release.wait_for(component, 1)


@pytest.mark.parametrize("component", ["decode", "prefill", "router"])
def test_a_deployment_is_rolled(release: HelmRelease, faulted: Faulted, component: str) -> None:
    """A new pod first, then the old one goes: that is when the streams must still run."""
    before, migrated = release.cluster.pods(component), migrations(release)
    faulted(f"`kubectl rollout restart` {component}", lambda: release.restart(component), before, LONG)
    if component == "decode":
        assert migrations(release) - migrated >= STREAMS_AT_FAULT_MIN
    release.wait_for(component, 1)


def test_no_short_request_fails_while_the_router_is_rolled(release: HelmRelease) -> None:
    statuses: list[int] = []

    async def ask_until(done: asyncio.Event) -> None:
        body = {"model": "smollm2", "prompt": "One", "max_tokens": 1}
        async with httpx2.AsyncClient(base_url=release.url, headers=release.headers, timeout=60) as pooled:
            asked = []
            while not done.is_set():
                asked.append(asyncio.create_task(pooled.post("/v1/completions", json=body)))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(done.wait(), SHORT_REQUEST_SECONDS)
            statuses.extend([answer.status_code for answer in await asyncio.gather(*asked)])

    async def run() -> None:
        done = asyncio.Event()
        asking = asyncio.create_task(ask_until(done))
        await asyncio.to_thread(release.restart, "router")
        await asyncio.to_thread(release.wait_for, "router", 1)
        done.set()
        await asking

    asyncio.run(run())
    assert len(statuses) > 100
    assert set(statuses) == {200}


SHORT_REQUEST_SECONDS = 0.05  # from one short request to the next
QUEUE_BOUND = ("--set", "router.config.maxQueuedRequests=500")
PAGE_SIZE = ("--set", "prefill.config.pageSize=32", "--set", "decode.config.pageSize=32")


@pytest.mark.parametrize(
    ("name", "flags", "components"),
    [
        ("`helm upgrade`, a queue's bound", QUEUE_BOUND, ["router"]),
        ("`helm upgrade`, the page size", PAGE_SIZE, ["prefill", "decode", "router"]),
        ("`helm upgrade`, back again", (), ["prefill", "decode"]),
    ],
)
def test_an_upgrade(
    release: HelmRelease, faulted: Faulted, name: str, flags: tuple[str, ...], components: list[str]
) -> None:
    victims = [pod for component in components for pod in release.cluster.pods(component)]
    upgrade: Callable[[], None] = lambda: release.upgrade(*flags)  # noqa: E731
    faulted(name, upgrade, victims, LONG)


def test_an_upgrade_keeps_what_was_scaled(release: HelmRelease) -> None:
    release.scale("decode", 2)
    release.wait_for("decode", 2)
    release.upgrade("--set", "router.config.maxQueuedRequests=600")
    release.wait_for("decode", 2)
    release.scale("decode", 1)
    release.wait_for("decode", 1)


def killed(faulted: Faulted, name: str, pod: ClusterPod) -> None:
    """SIGKILL to a pod's process while streams run."""
    pid = node.process_of(pod)
    kill = lambda: os.kill(pid, signal.SIGKILL)  # noqa: E731
    faulted(name, kill, [pod], struck=lambda: not node.is_running(pid))


def terminating(release: HelmRelease, before: list[ClusterPod]) -> list[ClusterPod]:
    """Those of these pods that terminate or are gone."""
    staying = {pod.uid for pod in release.cluster.pods(before[0].component) if not pod.terminating}
    return [pod for pod in before if pod.uid not in staying]


def migrations(release: HelmRelease) -> float:
    """Requests whose pages were fetched by another decode pod."""
    return release.total("router", "segue_migrations_total{cause=drain,outcome=migrated}")


def continuations(release: HelmRelease) -> float:
    """Attempts after the first, for whatever cause."""
    found = [release.metrics(pod) for pod in release.cluster.pods("router") if pod.ready]
    return sum(
        value
        for metrics in found
        for name, value in metrics.items()
        if name.startswith("segue_continuations_total")
    )

"""One cluster and one release for all tests here; what a failed test leaves is written to `tests/cluster/failed/`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.cluster.kubernetes import COMMAND, ROOT, Cluster, Pod, load_image, start_own, stop_own
from tests.cluster.load import STREAMS_AT_FAULT_MIN, Plan, Report, run_streams
from tests.cluster.release import Release
from tests.waiting import until

IMAGES = ("segue-router", "segue-worker", "segue-model-smollm2")
FAILED = Path(__file__).parent / "failed"
REPORTS = pytest.StashKey[list[Report]]()
PLANS = [Plan(f"Chapter {number}. The expedition left the harbour at dawn, and", 240) for number in range(16)]
LONGEST = 1100  # tokens
LATER = [Plan(f"Letter {number}. Dear friend, since you left us", 60) for number in range(4)]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with our images, and an empty namespace."""
    context = os.environ.get("SEGUE_TEST_CONTEXT", "")
    if not context and not COMMAND.exists():
        pytest.skip(f"no cluster: {COMMAND} is not there, and SEGUE_TEST_CONTEXT names none")
    shutil.rmtree(FAILED, ignore_errors=True)
    if context:
        cluster = Cluster("segue-test", context=context)
    else:
        cluster = Cluster("segue-test", start_own())
        version = _chart_version()
        for image in IMAGES:
            load_image(f"localhost/{image}:{version}", tmp_path_factory.mktemp("image"))
    cluster.kubectl("create", "namespace", cluster.namespace)
    try:
        yield cluster
    finally:
        cluster.kubectl("delete", "namespace", cluster.namespace, "--wait=true")
        if not context:
            stop_own()


@pytest.fixture(scope="session")
def release(cluster: Cluster) -> Release:
    """The chart with the values of the CPU demo; one router is enough for most tests."""
    release = Release(cluster)
    try:
        release.install("--set", "router.replicas=1")
    except AssertionError:
        cluster.describe_to(FAILED / "install")
        raise
    return release


@pytest.fixture(scope="session")
def undisturbed(release: Release) -> dict[str, str]:
    """What each prompt is answered when nothing happens; a longer answer begins with the shorter one."""
    plans = [Plan(plan.prompt, LONGEST) for plan in PLANS] + LATER
    report = run_streams(release.url, plans, "undisturbed")
    assert [stream.tokens for stream in report.streams] == [plan.max_tokens for plan in plans]
    return {stream.plan.prompt: stream.text for stream in report.streams}


Faulted = Callable[..., Report]


@pytest.fixture
def faulted(release: Release, undisturbed: dict[str, str], pytestconfig: pytest.Config) -> Faulted:
    """Do this to the cluster while streams run and come, and check what their readers saw."""

    def run(
        name: str, fault: Callable[[], object], victims: list[Pod] | None = None, max_tokens: int = 240
    ) -> Report:
        plans = [Plan(plan.prompt, max_tokens) for plan in PLANS]
        report = run_streams(release.url, plans, name, fault, LATER)
        pytestconfig.stash.setdefault(REPORTS, []).append(report)
        assert report.running_at_fault >= STREAMS_AT_FAULT_MIN
        for stream in report.streams:
            assert stream.ends == ["length"]
            assert stream.tokens == stream.plan.max_tokens
            assert stream.text
            assert undisturbed[stream.plan.prompt].startswith(stream.text)
        for pod in victims or []:
            until(lambda pod=pod: release.has_changed(pod), 60, f"the end of {pod.name}")  # type: ignore[misc]
        until(lambda: not release.held(), 60, "everything given back")
        return report

    return run


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """The faults as a table; docs/operating.md has one."""
    del exitstatus
    reports = config.stash.get(REPORTS, [])
    if not reports:
        return
    write = terminalreporter.write_line
    write("")
    write("| fault | streams | running at it | longest pause: median | max | until the last stream's end |")
    write("|---|---|---|---|---|---|")
    for report in reports:
        pauses = report.pauses
        write(
            f"| {report.name} | {len(report.streams)} | {report.running_at_fault} | {median(pauses):.2f} s "
            f"| {pauses[-1]:.2f} s | {report.last_end:.1f} s |"
        )
    write(f"{sum(len(report.streams) for report in reports)} streams")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Keep pod logs, events and descriptions of the moment a test failed."""
    report = yield
    release = getattr(item, "funcargs", {}).get("release")
    if call.when == "call" and call.excinfo is not None and isinstance(release, Release):
        release.cluster.describe_to(FAILED / item.name)
    return report


def _chart_version() -> str:
    chart = (ROOT / "charts" / "segue" / "Chart.yaml").read_text()
    return next(line.split()[1].strip('"') for line in chart.splitlines() if line.startswith("appVersion"))

"""One cluster and one release for all tests here; what a failed test leaves is written to `tests/cluster/failed/`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import pytest
from tokenizers import Tokenizer

from images.release.make import IMAGES as RELEASED
from images.release.make import ROOT, make_release
from images.release.publish import Registry
from shared.local.model_store import resolve
from tests.cluster.kubernetes import (
    COMMAND,
    Cluster,
    ClusterPod,
    image_archive,
    image_tag,
    load_image,
    start_own,
    stop_own,
)
from tests.cluster.load import STREAMS_AT_FAULT_MIN, LoadReport, Plan, ask, run_streams
from tests.cluster.registry import require, running_registry
from tests.cluster.release import HelmRelease
from tests.waiting import until

IMAGES = ("segue-router", "segue-worker", "segue-model-smollm2")
FAILED = Path(__file__).parent / "failed"
CLUSTER = pytest.StashKey[Cluster]()
REPORTS = pytest.StashKey[list[LoadReport]]()
NOTES = pytest.StashKey[list[str]]()
# Tokens. LONG: a pod that is replaced leaves when the new one has started. LONGEST: a thousand are still to come, to
# eight streams or more on each of two decode pods. The prompts are the same, so a short answer is the beginning of a
# long one.
SHORT, LONG, LONGEST = 240, 700, 1200
STREAMS = {SHORT: 16, LONG: 16, LONGEST: 20}
PLANS = {
    tokens: [
        Plan(f"Chapter {number}. The expedition left the harbour at dawn, and", tokens)
        for number in range(count)
    ]
    for tokens, count in STREAMS.items()
}
LATER = [Plan(f"Letter {number}. Dear friend, since you left us", 60) for number in range(4)]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """A cluster with our images, and an empty namespace."""
    context = os.environ.get("SEGUE_TEST_CONTEXT", "")
    if not context and not COMMAND.exists():
        pytest.exit(f"no cluster: {COMMAND} is not there, and SEGUE_TEST_CONTEXT names none", returncode=1)
    shutil.rmtree(FAILED, ignore_errors=True)
    try:
        cluster = (
            Cluster("segue-test", context=context)
            if context
            else _own_cluster(tmp_path_factory.mktemp("images"))
        )
        cluster.kubectl("create", "namespace", cluster.namespace)
        pytestconfig.stash[CLUSTER] = cluster
        yield cluster
        cluster.kubectl("delete", "namespace", cluster.namespace, "--wait=true")
    finally:
        if not context:
            stop_own()


def _own_cluster(folder: Path) -> Cluster:
    """It starts, and loads an image, while the next image is written to a file."""
    names = [f"localhost/{image}:{image_tag()}" for image in IMAGES]
    with ThreadPoolExecutor(1) as pool:
        archives = [pool.submit(image_archive, name, folder) for name in names]
        cluster = Cluster("segue-test", start_own())
        for archive in archives:
            load_image(archive.result())
    return cluster


@pytest.fixture(scope="session")
def registry_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("registry")


@pytest.fixture(scope="session")
def registry(registry_folder: Path) -> Iterator[Registry]:
    """An empty registry on this machine, without TLS."""
    with running_registry(registry_folder) as registry:
        yield registry


@pytest.fixture(scope="session")
def made(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of HEAD for this registry: what `make release` makes, in another folder."""
    require("buildah")
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    if changed.stdout:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "a release is made of a commit: commit changes"
        )
    return make_release(tmp_path_factory.mktemp("made") / "release", registry.name, "", list(RELEASED))


@pytest.fixture(scope="session")
def release(cluster: Cluster) -> HelmRelease:
    """The chart with the values of the CPU demo."""
    release = HelmRelease(cluster)
    release.install()
    return release


@pytest.fixture(scope="session")
def undisturbed(release: HelmRelease) -> dict[Plan, str]:
    """What each request is answered when nothing happens: the beginning of the longest answer to its prompt."""
    tokenizer = Tokenizer.from_file(str(resolve("smollm2", lambda _line: None) / "tokenizer.json"))
    asked = PLANS[LONGEST] + LATER
    answers = dict(
        zip([plan.prompt for plan in asked], ask(release.url, release.api_key, asked), strict=True)
    )
    assert [len(answers[plan.prompt]) for plan in asked] == [plan.max_tokens for plan in asked]
    return {
        plan: tokenizer.decode(answers[plan.prompt][: plan.max_tokens])
        for plans in (*PLANS.values(), LATER)
        for plan in plans
    }


Faulted = Callable[..., LoadReport]


@pytest.fixture
def faulted(release: HelmRelease, undisturbed: dict[Plan, str], pytestconfig: pytest.Config) -> Faulted:
    """Do this to the cluster while streams run and come, and check what their readers saw."""

    def run(
        name: str,
        fault: Callable[[], object],
        victims: list[ClusterPod] | None = None,
        tokens: int = SHORT,
        struck: Callable[[], bool] | None = None,  # seen sooner than by the API server
    ) -> LoadReport:
        changed = lambda: all(release.has_changed(pod) for pod in victims or [])  # noqa: E731
        report = run_streams(
            release.url, release.api_key, PLANS[tokens], name, fault, LATER, struck or changed
        )
        until(changed, 60, f"{name}: a change in its victims")
        pytestconfig.stash.setdefault(REPORTS, []).append(report)
        assert report.running >= STREAMS_AT_FAULT_MIN
        for stream in report.streams:
            assert stream.ends == ["length"]
            assert stream.tokens == stream.plan.max_tokens
            assert stream.text == undisturbed[stream.plan]
        until(lambda: not release.held(), 60, "everything given back")
        return report

    return run


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """The faults as a table; docs/operating.md has one."""
    del exitstatus
    write = terminalreporter.write_line
    if reports := config.stash.get(REPORTS, []):
        _write_table(write, reports)
    for note in config.stash.get(NOTES, []):
        write(note)


def _write_table(write: Callable[[str], None], reports: list[LoadReport]) -> None:
    write("")
    write(
        "| fault | streams | running when it struck | longest pause: median | max | until the last stream's end |"
    )
    write("|---|---|---|---|---|---|")
    for report in reports:
        pauses = report.pauses
        write(
            f"| {report.name} | {len(report.streams)} | {report.running} | {median(pauses):.2f} s "
            f"| {pauses[-1]:.2f} s | {report.last_end:.1f} s |"
        )
    write(f"{sum(len(report.streams) for report in reports)} streams")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep pod logs, events and descriptions of the moment a test, or what it needs, failed."""
    del call
    report = yield
    if report.failed and CLUSTER in item.config.stash:
        item.config.stash[CLUSTER].describe_to(FAILED / f"{item.name}-{report.when}")
    return report

"""An upgrade from an older commit's chart and images: it keeps keys and replicas, and every stream.

Not a part of `make cluster-test`, for it builds the images of that commit as well:

    make upgrade-test FROM=COMMIT
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import IMAGES, LATER, LONGEST, NOTES, PLANS, REPORTS
from tests.cluster.kubernetes import Cluster, image_archive, load_image
from tests.cluster.load import STREAMS_AT_FAULT_MIN, run_streams
from tests.cluster.older_version import OlderVersion, build_older_version
from tests.cluster.release import CHART, COMPONENTS, LASTING_VALUES, NAME, HelmRelease
from tests.waiting import until

COMMIT = os.environ.get("SEGUE_UPGRADE_FROM", "")
SECRETS = (f"{NAME}-api-keys", f"{NAME}-links-router", f"{NAME}-links-worker")
SAMPLED = "segue_sampled_tokens_total"
STREAMS = 16
pytestmark = [
    pytest.mark.skipif(not COMMIT, reason="SEGUE_UPGRADE_FROM names no older commit (make upgrade-test)"),
    pytest.mark.timeout(900, func_only=True),
]


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> OlderVersion:
    return build_older_version(COMMIT, tmp_path_factory.mktemp("older"))


@pytest.fixture
def old_release(older: OlderVersion, cluster: Cluster, tmp_path: Path) -> Iterator[HelmRelease]:
    """The older chart with its images, with two decode pods where its values say one."""
    for image in IMAGES:
        load_image(image_archive(f"localhost/{image}:{older.tag}", tmp_path))
    release = HelmRelease(cluster, chart=older.chart, values=LASTING_VALUES)
    release.install("--set", f"image.tag={older.tag}")
    release.scale("decode", 2)
    release.wait_for("decode", 2)
    yield release
    cluster.helm("uninstall", NAME, "--wait")


def test_an_upgrade_from_an_older_version_keeps_keys_replicas_and_streams(
    cluster: Cluster, older: OlderVersion, old_release: HelmRelease, pytestconfig: pytest.Config
) -> None:
    release, plans = old_release, PLANS[LONGEST][:STREAMS]
    undisturbed = run_streams(release.url, release.api_key, plans + LATER, "undisturbed")
    texts = {stream.plan: stream.text for stream in undisturbed.streams}
    keys = secrets(cluster)
    old = [pod for component in COMPONENTS for pod in cluster.pods(component)]

    release.chart = CHART
    report = run_streams(
        release.url,
        release.api_key,
        plans,
        f"`helm upgrade` from {older.commit}",
        release.upgrade,
        LATER,
        lambda: any(release.has_changed(pod) for pod in old),
    )

    assert report.running >= STREAMS_AT_FAULT_MIN
    assert [stream.ends for stream in report.streams] == [["length"]] * len(plans + LATER)
    assert [stream.tokens for stream in report.streams] == [plan.max_tokens for plan in plans + LATER]
    assert {stream.plan: stream.text for stream in report.streams} == texts
    assert secrets(cluster) == keys
    release.wait_for("decode", 2)
    assert all(release.has_changed(pod) for pod in old), "a pod of the older version is left"
    until(lambda: not release.held(), 60, "everything given back")
    # Nothing else has been asked for since: all that is more than the later requests wanted, old pods had begun.
    crossed = release.total("decode", SAMPLED) - sum(plan.max_tokens for plan in LATER)
    assert crossed > 0, "no stream was continued by a new decode pod: they had ended before"
    pytestconfig.stash.setdefault(REPORTS, []).append(report)
    pytestconfig.stash.setdefault(NOTES, []).append(
        f"new decode pods sampled {crossed:.0f} tokens or more of streams that old ones had begun"
    )


def secrets(cluster: Cluster) -> list[dict[str, Any]]:
    return [cluster.get("secret", name)["data"] for name in SECRETS]

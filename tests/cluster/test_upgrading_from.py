"""An upgrade from an older version's chart and images: it keeps keys and replicas, and every stream.

Only where `SEGUE_UPGRADE_FROM` names a checkout of that version and buildah has its images with the tag `before`:

    git worktree add --detach ../old COMMIT
    cd ../old && make setup && images/build && TAG=$(images/tag || echo 0.1.0); cd -
    for name in router worker model-smollm2; do
      buildah tag localhost/segue-$name:$TAG localhost/segue-$name:before
    done
    SEGUE_UPGRADE_FROM=$PWD/../old .venv/bin/python -m pytest tests/cluster/test_upgrading_from.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster.conftest import IMAGES, LATER, LONG, PLANS, REPORTS
from tests.cluster.kubernetes import Cluster, image_archive, load_image
from tests.cluster.load import STREAMS_AT_FAULT_MIN, run_streams
from tests.cluster.release import CHART, COMPONENTS, NAME, HelmRelease
from tests.waiting import until

CHECKOUT = os.environ.get("SEGUE_UPGRADE_FROM", "")
pytestmark = [
    pytest.mark.skipif(not CHECKOUT, reason="SEGUE_UPGRADE_FROM names no older checkout"),
    pytest.mark.timeout(900, func_only=True),
]


def test_an_upgrade_from_an_older_version_keeps_keys_replicas_and_streams(
    cluster: Cluster, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    for image in IMAGES:
        load_image(image_archive(f"localhost/{image}:before", tmp_path))
    release = HelmRelease(cluster, chart=str(Path(CHECKOUT, CHART)))
    release.install("--set", "image.tag=before")
    try:
        release.scale("decode", 2)
        release.wait_for("decode", 2)
        plans = PLANS[LONG]
        undisturbed = run_streams(release.url, release.api_key, plans + LATER, "undisturbed")
        texts = {stream.plan: stream.text for stream in undisturbed.streams}
        keys = cluster.get("secret", f"{NAME}-api-keys")["data"]
        victims = [pod for component in COMPONENTS for pod in cluster.pods(component)]

        release.chart = CHART
        report = run_streams(
            release.url,
            release.api_key,
            plans,
            "`helm upgrade` from the older version",
            release.upgrade,
            LATER,
            lambda: any(release.has_changed(pod) for pod in victims),
        )

        assert report.running >= STREAMS_AT_FAULT_MIN
        assert [stream.ends for stream in report.streams] == [["length"]] * len(plans + LATER)
        assert {stream.plan: stream.text for stream in report.streams} == texts
        assert cluster.get("secret", f"{NAME}-api-keys")["data"] == keys
        release.wait_for("decode", 2)
        assert all(release.has_changed(pod) for pod in victims), "a pod of the older version is left"
        until(lambda: not release.held(), 60, "everything given back")
        pytestconfig.stash.setdefault(REPORTS, []).append(report)
    finally:
        cluster.helm("uninstall", NAME, "--wait")

"""What an upgrade does not change, because others may have set it since: replicas, and the seed of the links."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.charts.live_objects import cluster_of
from tests.charts.rendering import CHART, NAMESPACE, Object, objects, of_kind, run_helm

SEED = "bGl2ZSBsaXZlIGxpdmUgbGl2ZSBsaXZlIGxpdmUgbGk="


def upgraded(live: list[Object], folder: Path, *sets: str) -> list[Object]:
    """What an upgrade would send to a cluster where these objects live."""
    flags = [flag for setting in sets for flag in ("--set", setting)]
    with cluster_of(live, folder) as kubeconfig:
        text = run_helm(
            "template", "segue", str(CHART), "--is-upgrade", "--dry-run=server", "--disable-openapi-validation",
            "--namespace", NAMESPACE, "--kubeconfig", kubeconfig, *flags,
            environment={"KUBECACHEDIR": str(folder)},
        )  # fmt: skip
    return [document for document in yaml.safe_load_all(text) if document]


def scaled(role: str, replicas: int) -> Object:
    """The Deployment that the chart makes, after `kubectl scale`."""
    deployment = of_kind(objects(None), "Deployment")[f"segue-{role}"]
    return {**deployment, "spec": {**deployment["spec"], "replicas": replicas}}


def replicas(rendered: list[Object]) -> dict[str, int]:
    return {name: each["spec"].get("replicas", -1) for name, each in of_kind(rendered, "Deployment").items()}


@pytest.mark.parametrize("live", [0, 7])
def test_an_upgrade_keeps_the_replicas_that_were_scaled(live: int, tmp_path: Path) -> None:
    kept = upgraded([scaled("decode", live)], tmp_path, "decode.replicas=3", "prefill.replicas=2")
    assert replicas(kept) == {"segue-router": 2, "segue-prefill": 2, "segue-decode": live}


def test_an_upgrade_says_nothing_of_replicas_that_are_null(tmp_path: Path) -> None:
    kept = upgraded([scaled("decode", 7)], tmp_path, "decode.replicas=null")
    assert replicas(kept)["segue-decode"] == -1


def test_an_upgrade_keeps_the_seed(tmp_path: Path) -> None:
    live = {**of_kind(objects(None), "Secret")["segue-links"], "data": {"seed": SEED}}
    assert of_kind(upgraded([live], tmp_path), "Secret")["segue-links"]["data"] == {"seed": SEED}


def test_a_seed_is_drawn_where_there_is_none(tmp_path: Path) -> None:
    first, second = (of_kind(upgraded([], tmp_path), "Secret")["segue-links"]["data"] for _ in range(2))
    assert first != second

"""Who makes the keys of a release, on a real API server: a Job by default, Helm with `keys.from: render`, and neither
changes what is there. The releases here have no pods but those of the Jobs."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.cluster.kubernetes import ROOT, Cluster, image_tag
from tests.cluster.release import CHART
from tests.waiting import until

NAME = "keyed"
SECRETS = ("keyed-segue-links-router", "keyed-segue-links-worker", "keyed-segue-api-keys")
NO_PODS = ("--set", "router.replicas=0,prefill.replicas=0,decode.replicas=0")
KINDS = (
    "deployments,services,pods,secrets,configmaps,roles,rolebindings,serviceaccounts,networkpolicies,"
    "poddisruptionbudgets,jobs"
)
RENDER = ("--set", "keys.from=render")


def helm(cluster: Cluster, verb: str, *flags: str) -> None:
    cluster.helm(verb, NAME, CHART, *NO_PODS, "--set", f"image.tag={image_tag()}", "--timeout", "5m", *flags)


def left(cluster: Cluster) -> list[str]:
    found = cluster.get(KINDS, "-l", f"app.kubernetes.io/instance={NAME}")["items"]
    return sorted(f"{item['kind']} {item['metadata']['name']}" for item in found)


def keys(cluster: Cluster) -> dict[str, Any]:
    return {name: cluster.get("secret", name)["data"] for name in SECRETS}


def uninstall(cluster: Cluster) -> None:
    cluster.helm("uninstall", NAME, "--wait")
    until(lambda: not left(cluster), 60, "the end of every object of the release")


def test_a_job_makes_the_keys_once_and_another_one_removes_them(cluster: Cluster) -> None:
    helm(cluster, "install")
    made = keys(cluster)
    assert [thing for thing in left(cluster) if "-keys-" in thing] == []  # neither Job nor what it needed
    assert "kind: Secret" not in cluster.helm("get", "manifest", NAME)
    for _ in range(2):
        helm(cluster, "upgrade")
        assert keys(cluster) == made
    with pytest.raises(AssertionError, match=r"keys\.from is render, but Secret .* was made by the Job"):
        helm(cluster, "upgrade", *RENDER)
    uninstall(cluster)


def test_keys_that_were_rendered_stay_with_the_job_and_after_a_rollback(cluster: Cluster) -> None:
    helm(cluster, "install", *RENDER)
    made = keys(cluster)
    helm(cluster, "upgrade")
    assert keys(cluster) == made
    helm(cluster, "upgrade")  # the manifest before this one had them, too
    assert keys(cluster) == made
    cluster.helm("rollback", NAME, "1")
    assert keys(cluster) == made
    uninstall(cluster)


def test_a_rendered_secret_that_was_lost_is_made_by_the_job_and_not_removed_by_helm(cluster: Cluster) -> None:
    """Helm's last manifest has it, and its new one has not: such an object Helm deletes, unless it says keep."""
    helm(cluster, "install", *RENDER)
    cluster.kubectl("delete", "secret", SECRETS[2])
    helm(cluster, "upgrade")
    assert set(keys(cluster)) == set(SECRETS)
    uninstall(cluster)


def test_who_applies_manifests_makes_the_keys_by_the_same_job(cluster: Cluster) -> None:
    """docs/gitops.md. The Job of the end is applied, too: it must do nothing while the release lives."""
    server = json.loads(cluster.kubectl("version", "--output", "json"))["serverVersion"]["gitVersion"]
    tag = f"image.tag={image_tag()}"
    render = ("template", NAME, CHART, *NO_PODS, "--set", tag, "--kube-version", server)

    def apply(*flags: str) -> None:
        command = ["kubectl", "--namespace", cluster.namespace, "apply", "--filename", "-"]
        text = cluster.helm(*render, *flags)
        subprocess.run(command, input=text, text=True, check=True, env=cluster.environment, cwd=ROOT)

    apply("--no-hooks")
    apply("--show-only", "templates/keys-create.yaml")
    cluster.kubectl("wait", "--for=condition=complete", f"job/{NAME}-segue-keys-create", "--timeout=120s")
    made = keys(cluster)
    apply("--show-only", "templates/keys-remove.yaml")
    cluster.kubectl("wait", "--for=condition=complete", f"job/{NAME}-segue-keys-remove", "--timeout=120s")
    assert "and so is the release: its keys stay" in cluster.kubectl("logs", f"job/{NAME}-segue-keys-remove")
    assert keys(cluster) == made
    cluster.kubectl("delete", KINDS, "-l", f"app.kubernetes.io/instance={NAME}")
    until(lambda: not left(cluster), 60, "the end of every object of the release")

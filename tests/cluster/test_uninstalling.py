"""What an uninstalled release leaves: nothing. Runs last: files are run in the order of their names."""

from __future__ import annotations

from tests.cluster.kubernetes import Cluster
from tests.cluster.release import NAME, HelmRelease
from tests.waiting import until

KINDS = (
    "deployments,replicasets,services,pods,secrets,configmaps,roles,rolebindings,serviceaccounts,"
    "networkpolicies,poddisruptionbudgets,jobs"
)


def test_an_uninstalled_release_leaves_nothing(cluster: Cluster, release: HelmRelease) -> None:
    assert release.url
    cluster.helm("uninstall", NAME, "--wait")
    until(lambda: not left(cluster), 90, "the end of every object of the release")


def left(cluster: Cluster) -> list[str]:
    found = cluster.get(KINDS, "-l", "app.kubernetes.io/instance=segue")["items"]
    return [f"{item['kind']} {item['metadata']['name']}" for item in found]

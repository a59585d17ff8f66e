"""What the chart renders, taken as a whole: reviewed goldens, valid objects, names that do not clash."""

from __future__ import annotations

import pytest

from tests.charts.goldens import WHOLE, golden_file, golden_text, masked
from tests.charts.kubernetes_schemas import complaints, versions
from tests.charts.rendering import (
    CHART,
    EVERY_GPU_VALUE,
    EVERY_VALUE,
    NAMESPACE,
    USER_SETS,
    VALUE_SETS,
    RefusedError,
    manifest,
    objects,
    of_kind,
    pods,
    run_helm,
    selects,
)

VERSIONS = versions()
EVERYTHING = (
    "rdma.enabled=true",
    "rdma.acknowledgeOpenFabric=true",
    "rdma.devices=mlx5_0:1",
    "sameNodeGpuIpc.enabled=true",
    "sameNodeGpuIpc.runAsUser=10007",
    "router.service.type=LoadBalancer",
    "networkPolicy.clientsFrom[0].ipBlock.cidr=0.0.0.0/0",
)
NAMESPACED = {
    "ConfigMap", "Deployment", "Job", "NetworkPolicy", "PersistentVolumeClaim", "Pod", "PodDisruptionBudget", "Role",
    "RoleBinding", "Secret", "Service", "ServiceAccount",
}  # fmt: skip


@pytest.mark.parametrize("values", [*WHOLE, *USER_SETS])
def test_the_goldens_are_fresh(values: str) -> None:
    assert golden_file(values).read_text(encoding="utf-8") == golden_text(values), "run: make goldens"


def test_a_model_in_an_image_volume_is_valid_from_1_31_on() -> None:
    decode = of_kind(objects("image-volume"), "Deployment")["segue-decode"]
    takes = {version: not complaints(decode, version) for version in VERSIONS}
    assert takes == {version: not version.startswith(("1.29.", "1.30.")) for version in VERSIONS}
    values = str(CHART / "ci" / "image-volume.yaml")
    with pytest.raises(RefusedError, match=r"asks for Kubernetes 1\.31 or newer, and this is v1\.30\.4: use"):
        run_helm("template", "segue", str(CHART), "--kube-version", "1.30.4", "--values", values)


@pytest.mark.parametrize("values", [*VALUE_SETS, *(each for each in USER_SETS if each != "image-volume")])
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(values: str, version: str) -> None:
    assert [line for thing in objects(values) for line in complaints(thing, version)] == []


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_every_object_of_every_option_is_valid(version: str) -> None:
    rendered = objects("gpu", *EVERYTHING) + objects(EVERY_VALUE)
    rendered += objects(EVERY_GPU_VALUE) if version == VERSIONS[-1] else []  # claims of devices are younger
    assert [line for thing in rendered for line in complaints(thing, version)] == []


def test_the_versions_reach_from_the_oldest_to_now() -> None:
    assert VERSIONS[0].startswith("1.29.")
    assert len(VERSIONS) >= 6


def test_the_schemas_of_kubernetes_find_a_misspelt_field() -> None:
    service = of_kind(objects(None), "Service")["segue-router"]
    misspelt = {**service, "spec": {**service["spec"], "selecter": {}}}
    assert "selecter" in complaints(misspelt, VERSIONS[-1])[0]


@pytest.mark.parametrize("values", [None, *VALUE_SETS, *USER_SETS])
def test_helm_lint_has_nothing_to_say(values: str | None) -> None:
    chosen = ["--values", str(CHART / "ci" / f"{values}.yaml")] if values else []
    assert "1 chart(s) linted, 0 chart(s) failed" in run_helm("lint", "--strict", str(CHART), *chosen)


@pytest.mark.parametrize("values", [None, *VALUE_SETS, *USER_SETS])
def test_rendering_twice_gives_the_same_bytes(values: str | None) -> None:
    first = manifest(values)
    manifest.cache_clear()
    assert manifest(values) == first


def test_with_keys_that_are_rendered_nothing_else_is_random() -> None:
    first = manifest(None, "keys.from=render")
    manifest.cache_clear()
    second = manifest(None, "keys.from=render")
    assert second != first
    assert masked(second) == masked(first)


@pytest.mark.parametrize("values", [None, *VALUE_SETS, *USER_SETS])
def test_nothing_is_cluster_scoped(values: str | None) -> None:
    rendered = objects(values)
    assert {each["kind"] for each in rendered} <= NAMESPACED
    assert {each["metadata"]["namespace"] for each in rendered} == {NAMESPACE}


def test_no_object_is_rendered_twice() -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in objects(None)]
    assert len(names) == len(set(names))


def test_two_releases_in_a_namespace_do_not_touch() -> None:
    ours, theirs = objects(None), objects(None, release="other")
    names = [{(each["kind"], each["metadata"]["name"]) for each in rendered} for rendered in (ours, theirs)]
    assert names[0].isdisjoint(names[1])
    labels = [pod["metadata"]["labels"] for pod in pods(theirs).values()]
    selectors = [
        each["spec"]["selector"] for each in ours if each["kind"] in ("Deployment", "PodDisruptionBudget")
    ]
    selectors += [each["spec"]["podSelector"] for each in ours if each["kind"] == "NetworkPolicy"]
    selectors += [{"matchLabels": each["spec"]["selector"]} for each in ours if each["kind"] == "Service"]
    assert len(selectors) == 14
    assert not any(selects(selector, each) for selector in selectors for each in labels)
    own = [pod["metadata"]["labels"] for pod in pods(ours).values()]
    assert all(any(selects(selector, each) for each in own) for selector in selectors)


def test_a_release_whose_name_has_segue_is_not_named_twice() -> None:
    assert "my-segue-router" in of_kind(objects(None, release="my-segue"), "Deployment")
    assert "other-segue-router" in of_kind(objects(None, release="other"), "Deployment")


def test_the_longest_names_still_are_names() -> None:
    rendered = objects(None, release="r" * 53)
    assert max(len(each["metadata"]["name"]) for each in rendered) <= 63


@pytest.mark.parametrize(("version", "known"), [("1.20.2", False), ("1.25.9", False), ("1.26.0", True)])
def test_an_old_cluster_is_sent_no_field_that_it_does_not_know(version: str, known: bool) -> None:
    """Helm compares each object with the schema of the cluster, and installs nothing that has another field."""
    text = run_helm("template", "segue", str(CHART), "--kube-version", version)
    assert ("unhealthyPodEvictionPolicy" in text) == known

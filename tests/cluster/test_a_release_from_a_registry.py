"""A release is published, and installed by the README's command on a node that has no image: it serves.

Runs first: files are run in the order of their names, and this one needs a cluster of its own that is empty.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from images.release.publish import Registry, publish
from tests.cluster.conftest import IMAGES, NOTES
from tests.cluster.kubernetes import COMMAND, ROOT, Cluster, start_own, stop_own
from tests.cluster.load import Plan, ask
from tests.cluster.registry import registry_on_the_node
from tests.cluster.release import NAME, HelmRelease
from tests.waiting import comes_true

ADDRESS = "registry.example.com/ai"  # in the README
pytestmark = [
    pytest.mark.skipif(
        "SEGUE_TEST_CONTEXT" in os.environ or not COMMAND.exists(),
        reason="the node of another cluster cannot be given a registry",
    ),
    pytest.mark.timeout(900, func_only=True),
]


@pytest.fixture(scope="module")
def empty_cluster(registry: Registry, registry_folder: Path) -> Iterator[Cluster]:
    """A cluster without an image of ours, whose node reaches the registry."""
    del registry
    try:
        cluster = Cluster("segue-registry", start_own())
        assert not images_of_node(cluster), "the cluster was to be started for this test, and is in use"
        cluster.kubectl("create", "namespace", cluster.namespace)
        with registry_on_the_node(registry_folder):
            yield cluster
    finally:
        stop_own()


def images_of_node(cluster: Cluster) -> list[str]:
    """Names of Segue's images that the node has."""
    (node,) = cluster.get("nodes")["items"]
    names = [name for image in node["status"].get("images", []) for name in image["names"]]
    return sorted(name for name in names if any(image in name for image in IMAGES))


def command_of_readme(name: str) -> str:
    """The README's command that installs what was published, with this registry in it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace(ADDRESS, name)
    found = re.search(rf"^make publish REGISTRY={name}\n(helm install {NAME} .*)$", text, re.MULTILINE)
    assert found, "README.md was to have `make publish` and below it `helm install`"
    return found[1]


def test_a_published_release_is_installed_by_one_command_onto_a_node_without_images(
    made: Path, registry: Registry, empty_cluster: Cluster, pytestconfig: pytest.Config
) -> None:
    published = publish(made, registry)
    flags = f"--plain-http --timeout 10m --namespace {empty_cluster.namespace}"
    began = monotonic()
    done = subprocess.run(
        ["bash", "-ec", f"{command_of_readme(registry.name)} {flags}"],
        env=empty_cluster.environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    release = HelmRelease(empty_cluster)
    release.connect()
    (tokens,) = ask(release.url, release.api_key, [Plan("The expedition left", 8)])
    seconds = monotonic() - began

    assert len(tokens) == 8
    images = {
        f"{reference.rpartition(':')[0]}@{digest}"
        for reference, digest in published.items()
        if "/charts/" not in reference
    }
    assert len(images) == len(IMAGES)
    # A node tells its images every ten seconds or so.
    comes_true(lambda: set(images_of_node(empty_cluster)) == images, 60, look_seconds_max=2)
    assert set(images_of_node(empty_cluster)) == images
    pytestconfig.stash.setdefault(NOTES, []).append(
        f"`helm install oci://…` on a node without images: the first tokens after {seconds:.0f} s"
    )


def test_what_was_installed_passes_its_own_test_but_for_the_network(empty_cluster: Cluster) -> None:
    """This cluster enforces no network policy, and `helm test` has to say so; everything else passes."""
    said = empty_cluster.helm("test", NAME, "--logs", "--filter", f"!name={NAME}-isolation")
    assert re.search(r"Phase:\s+Succeeded", said), said
    assert re.search(r"\d+ bytes of KV moved for it", said), said
    with pytest.raises(AssertionError, match=f"{NAME}-isolation"):
        empty_cluster.helm("test", NAME, "--filter", f"name={NAME}-isolation")

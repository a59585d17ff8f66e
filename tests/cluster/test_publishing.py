"""A release goes into a registry and comes back the same. Starts no cluster: the registry is a process of this machine.

Needs what publishing needs: buildah with the images of this tree (`make images`), `skopeo` and `helm`; and Debian's
`docker-registry`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from images.release.make import ROOT, ReleaseError
from images.release.publish import Registry, publish
from tests.charts.rendering import run_helm
from tests.cluster.conftest import IMAGES
from tests.cluster.kubernetes import image_tag
from tests.cluster.registry import require


def pulled_chart(registry: Registry, folder: Path) -> Path:
    """The chart, from the registry."""
    reference = f"oci://{registry.name}/charts/segue"
    flags = ("--version", image_tag(), "--plain-http", "--destination", str(folder))
    run_helm("pull", reference, *flags)
    return folder / f"segue-{image_tag()}.tgz"


def test_chart_and_image_come_back_as_they_were_made(made: Path, registry: Registry, tmp_path: Path) -> None:
    published = publish(made, registry)
    name = f"{registry.name}/segue-router"
    digest = published[f"{name}:{image_tag()}"]

    chart = pulled_chart(registry, tmp_path)
    assert chart.read_bytes() == (made / chart.name).read_bytes()

    # skopeo compares each blob that it reads with its digest.
    pulled = tmp_path / "router"
    flags = ["--quiet", "--src-tls-verify=false", f"docker://{name}@{digest}", f"oci:{pulled}:router"]
    subprocess.run(["skopeo", "copy", "--preserve-digests", *flags], check=True)
    manifest = blob(pulled, digest)
    assert "sha256:" + hashlib.sha256(manifest.read_bytes()).hexdigest() == digest
    layers = json.loads(manifest.read_bytes())["layers"]
    assert has_licence(blob(pulled, layers[-1]["digest"])), "the layer of Segue's code has no licence"


def blob(layout: Path, digest: str) -> Path:
    """A file of an OCI layout."""
    return layout / "blobs" / digest.replace(":", "/")


def has_licence(layer: Path) -> bool:
    """Whether the package's LICENSE is in a layer, and is the repository's."""
    with tarfile.open(layer) as packed:
        found = [
            each for each in packed if each.name.endswith("/licenses/LICENSE") and "/segue_llm-" in each.name
        ]
        texts = [file.read() for each in found if (file := packed.extractfile(each))]
    return texts == [(ROOT / "LICENSE").read_bytes()]


@pytest.mark.parametrize("image", IMAGES)
def test_the_labels_have_the_tag_and_the_licence(image: str) -> None:
    require("buildah")
    named = f"localhost/{image}:{image_tag()}"
    found = subprocess.run(
        ["buildah", "inspect", "--type", "image", named], capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"buildah has no {named}: make images")
    labels = json.loads(found.stdout)["OCIv1"]["config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == image_tag()
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_what_is_rendered_from_the_registry_names_the_image_by_its_digest(
    made: Path, registry: Registry
) -> None:
    publish(made, registry)
    flags = ("--version", image_tag(), "--plain-http")
    rendered = run_helm("template", "segue", f"oci://{registry.name}/charts/segue", *flags)
    digests = json.loads((made / "release.json").read_text())["images"]
    assert len(digests) == len(IMAGES)
    for tagged, digest in digests.items():
        reference = f"{registry.name}/{tagged.partition(':')[0]}@{digest}"
        assert re.search(rf'image: "?{reference}"?$', rendered, re.MULTILINE), reference


def test_publishing_again_changes_nothing_and_another_image_of_the_tag_is_refused(
    made: Path, registry: Registry
) -> None:
    assert publish(made, registry) == publish(made, registry)
    other = f"sha256:{'0' * 64}"
    with pytest.raises(ReleaseError, match="a tag that was published keeps its image; raise the version"):
        registry.push_image(made / "images", f"segue-router:{image_tag()}", other)


def test_another_chart_of_the_version_is_refused(made: Path, registry: Registry, tmp_path: Path) -> None:
    publish(made, registry)
    package = made / f"segue-{image_tag()}.tgz"
    other = tmp_path / package.name
    other.write_bytes(gzip.compress(gzip.decompress(package.read_bytes()), 1))
    with pytest.raises(ReleaseError, match="has another chart of version"):
        registry.push_chart(other)


def test_a_release_for_another_registry_is_refused(made: Path, registry: Registry) -> None:
    with pytest.raises(ReleaseError, match=r"make release REGISTRY=registry\.example\.com"):
        publish(made, replace(registry, name="registry.example.com"))


def test_the_sums_are_those_of_the_files(made: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=made, check=True)
    summed = {line.split()[1] for line in (made / "SHA256SUMS").read_text().splitlines()}
    assert summed == {path.name for path in made.iterdir() if path.is_file()} - {"SHA256SUMS"}
    assert {Path(name).suffix for name in summed} == {".gz", ".json", ".md", ".tgz", ".whl"}

"""The chart of a release: Helm takes it, it names its images by digest, and the same commit gives the same bytes."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import yaml

from images.release.changelog import changes, notes
from images.release.chart import ChartRelease, pack_chart
from shared.primitives.version import VERSION
from tests.charts.rendering import ROOT, Object, pods, run_helm
from tests.release.trees import copy_tree

EPOCH_SECONDS = 1_700_000_000
NUMBER = "1.2.3"
NAMES = ("segue-router:1.2.3", "segue-worker:1.2.3", "segue-worker:1.2.3-cuda", "segue-model-smollm2:1.2.3")
DIGESTS = {name: f"sha256:{number:064}" for number, name in enumerate(NAMES)}
NOTES = "### Upgrading\n\n- `a` is `b`.\n\n### Added\n\n- A [page](a.md) of it.\n\n### Fixed\n\n- Nothing.\n"
RELEASE = ChartRelease(NUMBER, DIGESTS, "registry.example.com/ai", "https://example.com/segue", NOTES)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart, packed."""
    return pack_chart(ROOT, tmp_path_factory.mktemp("chart"), RELEASE, EPOCH_SECONDS)


def images(package: Path, *flags: str) -> dict[str, str]:
    """Role → its image; `model`: where decode pods have theirs from."""
    text = run_helm("template", "segue", str(package), *flags)
    rendered: list[Object] = [document for document in yaml.safe_load_all(text) if document]
    specs = {role: pod["spec"] for role, pod in pods(rendered).items()}
    found = {role: specs[role]["containers"][0]["image"] for role in ("router", "prefill", "decode")}
    model = specs["decode"]["initContainers"][0]
    return found | {"model": model["image"]}


def test_helm_lints_it_without_a_word(package: Path) -> None:
    assert "[" not in run_helm("lint", "--strict", str(package)).replace("==>", "")


def test_each_image_is_the_one_of_the_release_by_digest(package: Path) -> None:
    at = "registry.example.com/ai"
    router, worker, cuda, model = DIGESTS.values()
    assert images(package) == {
        "router": f"{at}/segue-router@{router}",
        "prefill": f"{at}/segue-worker@{worker}",
        "decode": f"{at}/segue-worker@{worker}",
        "model": f"{at}/segue-model-smollm2@{model}",
    }
    memory = [
        f"{role}.resources.{kind}.memory=8Gi"
        for role in ("prefill", "decode")
        for kind in ("requests", "limits")
    ]
    on_gpus = images(package, "--set", ",".join(["device=cuda", *memory]))
    assert on_gpus["decode"] == f"{at}/segue-worker@{cuda}"


def test_another_registry_has_the_same_digests_and_a_tag_of_the_user_none(package: Path) -> None:
    router = DIGESTS["segue-router:1.2.3"]
    moved = images(package, "--set", "image.registry=harbor.example.com")
    assert moved["router"] == f"harbor.example.com/segue-router@{router}"
    own = images(package, "--set", "image.tag=mine")
    assert own["router"] == "registry.example.com/ai/segue-router:mine"


def test_it_has_licence_readme_and_what_artifact_hub_shows(package: Path) -> None:
    with tarfile.open(package) as archive:
        packed = {each.name: (archive.extractfile(each) or io.BytesIO()).read() for each in archive}
    assert packed["segue/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert packed["segue/README.md"] == (ROOT / "charts/segue/README.md").read_bytes()
    chart = yaml.safe_load(packed["segue/Chart.yaml"])
    assert (chart["version"], chart["appVersion"], chart["home"]) == (NUMBER, NUMBER, RELEASE.source)
    annotations = chart["annotations"]
    assert annotations["artifacthub.io/license"] == "Apache-2.0"
    assert annotations["artifacthub.io/prerelease"] == "false"
    shown = yaml.safe_load(annotations["artifacthub.io/images"])
    assert [each["name"] for each in shown] == [
        "segue-router",
        "segue-worker",
        "segue-worker-cuda",
        "segue-model-smollm2",
    ]
    assert shown[2]["image"] == f"registry.example.com/ai/segue-worker@{DIGESTS['segue-worker:1.2.3-cuda']}"
    assert yaml.safe_load(annotations["artifacthub.io/changes"]) == [
        {"kind": "changed", "description": "`a` is `b`."},
        {"kind": "added", "description": "A page of it."},
        {"kind": "fixed", "description": "Nothing."},
    ]


def test_another_folder_gives_the_same_bytes(package: Path, tmp_path: Path) -> None:
    again = pack_chart(copy_tree(tmp_path / "tree"), tmp_path, RELEASE, EPOCH_SECONDS)
    assert again.read_bytes() == package.read_bytes()


def test_the_notes_are_the_part_of_the_version() -> None:
    changelog = (
        "# Log\n\n## Unreleased\n\n- New.\n\n## 1.2.3 (2026-12-01)\n\n### Fixed\n\n- Old.\n\n## 1.2.30\n"
    )
    assert notes(changelog, "1.2.3") == "### Fixed\n\n- Old.\n"
    assert notes(changelog, "1.3.0-dev.t1") == "- New.\n"
    with pytest.raises(ValueError, match=r"says nothing of 1\.2\b"):
        notes(changelog, "1.2")


def test_this_changelog_has_notes_of_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = VERSION.replace(".dev0", "-dev.t1")
    assert {each["kind"] for each in changes(notes(changelog, version))} >= {"added", "changed"}

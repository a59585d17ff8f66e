"""Wheel and sdist: all that runs is in them, with the licence, and the same commit gives the same bytes."""

from __future__ import annotations

import email
import tarfile
import zipfile
from pathlib import Path

import pytest

from images.release.packages import build_packages
from shared.primitives.version import VERSION
from tests.release.trees import ROOT, copy_tree, files_of_tree

EPOCH_SECONDS = 1_700_000_000
PACKAGES = ("decode/", "prefill/", "router/", "shared/")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, and the sdist."""
    folder = tmp_path_factory.mktemp("built")
    sdist, wheel = sorted(
        build_packages(copy_tree(tmp_path_factory.mktemp("tree")), folder, EPOCH_SECONDS),
        key=lambda path: path.suffix == ".whl",
    )
    return wheel, sdist


def test_the_names_have_the_version(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    assert wheel.name == f"segue_llm-{VERSION}-py3-none-any.whl"
    assert sdist.name == f"segue_llm-{VERSION}.tar.gz"


def test_the_wheel_has_every_file_of_the_four_packages_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - metadata == {name for name in files_of_tree() if name.startswith(PACKAGES)}
    assert {Path(name).suffix for name in names} >= {".cpp", ".cu", ".py", ".typed"}


def test_the_licence_is_in_both(built: tuple[Path, Path]) -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    wheel, sdist = built
    with zipfile.ZipFile(wheel) as packed:
        [metadata] = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        assert packed.read(f"segue_llm-{VERSION}.dist-info/licenses/LICENSE") == licence
        assert email.message_from_bytes(packed.read(metadata))["License-Expression"] == "Apache-2.0"
    with tarfile.open(sdist) as archive:
        found = archive.extractfile(f"segue_llm-{VERSION}/LICENSE")
        assert found is not None
        assert found.read() == licence


def test_another_folder_and_the_sdist_give_the_same_bytes(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = built
    copied, unpacked = tmp_path / "copied", tmp_path / "unpacked"
    again = {path.name: path for path in build_packages(copy_tree(copied), tmp_path, EPOCH_SECONDS)}
    assert again[wheel.name].read_bytes() == wheel.read_bytes()
    assert again[sdist.name].read_bytes() == sdist.read_bytes()
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    [tree] = unpacked.iterdir()
    folder = tmp_path / "of_sdist"
    folder.mkdir()
    build_packages(tree, folder, EPOCH_SECONDS)
    assert (folder / wheel.name).read_bytes() == wheel.read_bytes()

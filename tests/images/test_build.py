"""What `images/build` and `images/lock` say when they cannot begin. Run from a folder that has nothing else in it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from images.sbom import bill
from tests.images.containerfiles import IMAGES, ROOT

TOOLS = ("bash", "dirname", "sed", "mkdir")  # what the scripts use before they say what is missing


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the scripts alone, and a folder `tools` that stands for PATH."""
    for path in ("images/build", "images/lock"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / "tools").mkdir()
    for tool in TOOLS:
        (tmp_path / "tools" / tool).symlink_to(str(shutil.which(tool)))
    return tmp_path


def set_up(checkout: Path) -> None:
    """As after `make setup`."""
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/python").symlink_to(sys.executable)


def complaint(checkout: Path, *command: str, **variables: str) -> str:
    """The one line that a script refuses with."""
    result = subprocess.run(
        command,
        cwd=checkout,
        env={"PATH": str(checkout / "tools"), "HOME": str(checkout), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert result.returncode == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    return line


def test_an_unknown_image_is_named_before_anything_is_made(checkout: Path) -> None:
    line = complaint(checkout, "images/build", "router", "gateway")
    assert line == "images/build: it makes router, worker, model and worker-cuda, not gateway"


def test_an_unknown_lock_is_named_before_anything_is_made(checkout: Path) -> None:
    line = complaint(checkout, "images/lock", "worker")
    assert line == (
        "images/lock: it makes build, router, worker-cpu, worker-cuda, cuda-kernels and dev, not worker"
    )


@pytest.mark.parametrize("names", [[], ["router", "worker", "model"], ["worker-cuda"]], ids=" ".join)
def test_without_the_virtual_environment_it_says_make_setup(checkout: Path, names: list[str]) -> None:
    assert (
        complaint(checkout, "images/build", *names) == "images/build: it needs .venv/bin/python: make setup"
    )


def test_without_buildah_it_says_how_to_install_it(checkout: Path) -> None:
    set_up(checkout)
    line = complaint(checkout, "images/build")
    assert line == "images/build: it needs buildah (Debian: apt-get install buildah)"


def test_without_debootstrap_it_says_how_to_install_it_or_to_do_without(checkout: Path) -> None:
    set_up(checkout)
    (checkout / "tools" / "buildah").symlink_to(str(shutil.which("false")))  # one that has no base yet
    line = complaint(checkout, "images/build")
    assert line.startswith("images/build: it needs debootstrap (Debian: apt-get install debootstrap)")
    assert "SEGUE_BASE" in line


def test_a_base_by_its_tag_is_refused(checkout: Path) -> None:
    line = complaint(checkout, "images/build", SEGUE_BASE="docker.io/library/debian:bookworm-slim")
    assert "debian:bookworm-slim" in line
    assert "digest" in line


def test_the_bill_of_materials_has_every_locked_package_with_its_hashes_and_debians() -> None:
    document = bill("segue-router", "1.2", str(IMAGES / "router.lock"), ["libc6 2.36-9+deb12u10"])
    assert document["bomFormat"] == "CycloneDX"
    assert document["metadata"]["component"]["name"] == "segue-router"
    components = {each["name"]: each for each in document["components"]}
    lock = (IMAGES / "router.lock").read_text(encoding="utf-8")
    names = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE))
    assert components.keys() == names | {"libc6"}
    assert components["libc6"]["purl"] == "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10"
    hashes = [
        found["content"]
        for reference in components["fastapi"]["externalReferences"]
        for found in reference["hashes"]
    ]
    assert hashes
    assert all(f"--hash=sha256:{content}" in lock for content in hashes)


def test_the_scripts_can_be_run() -> None:
    assert all((IMAGES / name).stat().st_mode & 0o111 for name in ("build", "lock"))

"""An older commit of this repository as an operator has it: its chart and its images, built by its own scripts."""

from __future__ import annotations

import re
import subprocess
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from tests.cluster.kubernetes import ROOT
from tests.cluster.release import CHART

BUILT = re.compile(r"^localhost/segue-router:(\S+) ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class OlderVersion:
    """Where its chart lies, and the tag that its images have in buildah's store."""

    commit: str
    chart: str
    tag: str


def build_older_version(commit: str, folder: Path) -> OlderVersion:
    """Unpack a commit into a new folder, and make its images there with this checkout's environment."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="fully_trusted")  # it is this repository
    (folder / ".venv").symlink_to(ROOT / ".venv")
    said = subprocess.run(
        [folder / "images" / "build"], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    built = BUILT.search(said)
    assert built, f"images/build of {commit} was to name the images that it made, and said {said!r}"
    return OlderVersion(commit, str(folder / CHART), built[1])

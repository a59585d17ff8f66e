"""Packs the chart of a release: version, registry and the digests of its images are in it, the same bytes each time.

`helm package` writes the hour into the archive, so the archive is written here; `helm lint`, `helm push` and `helm
install` read it like any other. Each image is named by the digest that it was pushed with (`digests.json`, read by
templates/_names.tpl), so that the chart of last month brings the images of last month from any registry that has them.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from images.release.changelog import changes

NO_REGISTRY = "localhost"  # what values.yaml has in a checkout: images that were loaded onto nodes
_REGISTRY_LINE = f"  registry: {NO_REGISTRY}\n"


@dataclass(frozen=True, slots=True)
class ChartRelease:
    """What a release knows that a checkout does not."""

    version: str
    digests: dict[str, str]  # segue-router:1.2.3 → sha256:…
    registry: str
    source: str  # the repository's address, or nothing
    notes: str

    @property
    def annotations(self) -> dict[str, str]:
        """What Artifact Hub shows."""
        images = [
            {
                "name": tagged.replace(f":{self.version}", ""),
                "image": f"{self.registry}/{_repository(tagged)}@{digest}",
            }
            for tagged, digest in self.digests.items()
        ]
        return {
            "artifacthub.io/license": "Apache-2.0",
            "artifacthub.io/prerelease": str("-" in self.version).lower(),
            "artifacthub.io/images": yaml.safe_dump(images, sort_keys=False),
            "artifacthub.io/changes": yaml.safe_dump(changes(self.notes), sort_keys=False, width=1000),
        }


def pack_chart(tree: Path, folder: Path, release: ChartRelease, epoch_seconds: int) -> Path:
    """Pack `charts/segue` of a tree into `folder`; `epoch_seconds` is the time of every file in it."""
    chart = tree / "charts" / "segue"
    paths = [path for path in chart.rglob("*") if path.is_file()]
    files = {path.relative_to(chart).as_posix(): path.read_bytes() for path in paths}
    files["Chart.yaml"] = _metadata(files["Chart.yaml"], release)
    files["values.yaml"] = _values(files["values.yaml"].decode(), release).encode()
    files["digests.json"] = json.dumps(release.digests, indent=1).encode()
    files["LICENSE"] = (tree / "LICENSE").read_bytes()
    path = folder / f"segue-{release.version}.tgz"
    names = ["Chart.yaml", *sorted(files.keys() - {"Chart.yaml"})]
    with (
        path.open("wb") as out,
        gzip.GzipFile("", "wb", fileobj=out, mtime=epoch_seconds) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name in names:
            entry = tarfile.TarInfo(f"segue/{name}")
            entry.size, entry.mtime, entry.mode = len(files[name]), epoch_seconds, 0o644
            archive.addfile(entry, io.BytesIO(files[name]))
    return path


def _repository(tagged: str) -> str:
    return tagged.partition(":")[0]


def _metadata(text: bytes, release: ChartRelease) -> bytes:
    chart: dict[str, Any] = yaml.safe_load(text)
    chart |= {"version": release.version, "appVersion": release.version}
    if release.source:
        chart |= {"home": release.source, "sources": [release.source]}
    chart["annotations"] = release.annotations
    return yaml.safe_dump(chart, sort_keys=False, width=1000).encode()


def _values(text: str, release: ChartRelease) -> str:
    assert text.count(_REGISTRY_LINE) == 1, f"values.yaml has not one line {_REGISTRY_LINE!r}"
    return text.replace(_REGISTRY_LINE, f"  registry: {release.registry}\n")

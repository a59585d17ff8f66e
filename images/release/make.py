"""`make release`: everything that a release consists of, out of the commit that is checked out, into `dist/release`.

    python -m images.release.make [--registry registry.example.com/ai] [--source https://…] [--images router,worker]

Wheel and sdist, images as an OCI layout, the chart with their digests in it, bills of materials, notes, SHA256SUMS.
Twice from one commit the wheel, the sdist and the chart are the same bytes; times in them are the commit's. Tests are
not run: CI has run them. Nothing is sent anywhere: that is `release.publish`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from images.release.changelog import notes
from images.release.chart import NO_REGISTRY, ChartRelease, pack_chart
from images.release.images import NAMES, export_image, tagged_name
from images.release.packages import build_packages

ROOT = Path(__file__).parents[2]
RELEASE = ROOT / "dist" / "release"
IMAGES = ("router", "worker", "model")


class ReleaseError(Exception):
    """A release cannot be made of this tree, or not be published; the message is one sentence with the remedy."""


def make_release(folder: Path, registry: str, source: str, images: list[str]) -> Path:
    """Make a release of HEAD in `folder`, which is emptied first. Raises ReleaseError for a tree with changes."""
    if changed := _git("status", "--porcelain"):
        raise ReleaseError(
            f"a release is made of a commit, and this tree has changes: commit or remove\n{changed}"
        )
    version = _run(str(ROOT / "images" / "tag"))
    epoch_seconds = int(_git("log", "-1", "--format=%ct"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary)
        _unpack_head(tree)
        _say(f"packages of {version}")
        build_packages(tree, folder, epoch_seconds)
        _say(f"images {', '.join(images)}")
        digests = _images(images, version, folder)
        text = notes((tree / "CHANGELOG.md").read_text(encoding="utf-8"), version)
        chart = ChartRelease(version, digests, registry, source, text)
        _say(f"chart segue-{version}.tgz for {registry}")
        pack_chart(tree, folder, chart, epoch_seconds)
    (folder / "NOTES.md").write_text(f"# Segue {version}\n\n{text}", encoding="utf-8")
    record = {"version": version, "registry": registry, "images": digests}
    (folder / "release.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    _write_sums(folder)
    return folder


def _images(names: list[str], version: str, folder: Path) -> dict[str, str]:
    """Build and export them; their bills of materials go beside them. Returns the digest of each."""
    subprocess.run([ROOT / "images" / "build", *names], check=True, stdout=subprocess.DEVNULL)
    digests = {}
    for name in names:
        tagged = tagged_name(name, version)
        digests[tagged] = export_image(tagged, folder / "images")
        bill = ROOT / "dist" / f"{tagged.replace(':', '-')}.cdx.json"
        if name != "model":  # it holds no software but a busybox
            shutil.copy(bill, folder)
    return digests


def _unpack_head(tree: Path) -> None:
    """What git has of HEAD, and nothing else that lies in the checkout."""
    archive = tree / "head.tar"
    subprocess.run(["git", "archive", "--output", archive, "HEAD"], cwd=ROOT, check=True)
    with tarfile.open(archive) as packed:
        packed.extractall(tree, filter="data")
    archive.unlink()


def _write_sums(folder: Path) -> None:
    """SHA256SUMS of the files; the layout of images names each of its own by its digest."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def _git(*arguments: str) -> str:
    return _run("git", "-C", str(ROOT), *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _say(line: str) -> None:
    sys.stderr.write(f"release: {line}\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m images.release.make", allow_abbrev=False)
    parser.add_argument(
        "--registry", default="", help="where images and chart will be published: it goes into the chart"
    )
    parser.add_argument(
        "--source", default="", help="the repository's public address: home and sources of the chart"
    )
    parser.add_argument("--images", default=",".join(IMAGES), help=f"of {', '.join(NAMES)}")
    flags = parser.parse_args()
    names = flags.images.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"there is no image {unknown[0]}: there are {', '.join(NAMES)}")
    try:
        made = make_release(RELEASE, flags.registry or NO_REGISTRY, flags.source, names)
    except (ReleaseError, ValueError) as error:
        sys.exit(f"release: {error}")
    _say(f"{made.relative_to(ROOT)} has it: " + ", ".join(sorted(path.name for path in made.iterdir())))


if __name__ == "__main__":
    main()

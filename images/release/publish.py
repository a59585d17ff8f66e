"""`make publish REGISTRY=…`: copies the images and the chart of `dist/release` into a registry, each by its digest.

    python -m images.release.publish registry.example.com/ai [--plain-http]

Needs `skopeo` for the images and `helm` for the chart, and their logins (`skopeo login`, `helm registry login`). A tag
or a version that the registry has already is left as it is when it is the same, and refused when it is another: no tag
means two images. Where `cosign` is installed and COSIGN_KEY names a key, images and chart are signed, and the bills of
materials attached. Packages go where packages go, by `twine`, not from here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from images.release.images import reference_in_layout
from images.release.make import RELEASE, ReleaseError

CHARTS = "charts"  # the chart is <registry>/charts/segue
_ABSENT = re.compile("manifest unknown|name unknown|not found", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Registry:
    """Where a release goes; `plain_http`: a registry without TLS, on this machine or in a test."""

    name: str
    plain_http: bool
    helm: str = "helm"

    def digest_of(self, tagged: str) -> str:
        """What a tag means there; nothing where it is not there."""
        command = [
            "skopeo",
            "inspect",
            *self._tls("--tls-verify"),
            "--format",
            "{{.Digest}}",
            f"docker://{self.name}/{tagged}",
        ]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode != 0 and not _ABSENT.search(found.stderr):
            raise ReleaseError(f"{self.name} does not say what it has: {found.stderr.strip()}")
        return found.stdout.strip()

    def push_image(self, layout: Path, tagged: str, digest: str) -> bool:
        """Copy an image, unless it is there. Raises ReleaseError where its tag is another image."""
        there = self.digest_of(tagged)
        if there and there != digest:
            raise ReleaseError(
                f"{self.name}/{tagged} is {there} there and {digest} here: a tag that was published keeps its image; "
                "raise the version"
            )
        if not there:
            source = f"oci:{layout}:{reference_in_layout(tagged)}"
            flags = ["--quiet", "--preserve-digests", *self._tls("--dest-tls-verify")]
            _run("skopeo", "copy", *flags, source, f"docker://{self.name}/{tagged}")
            assert self.digest_of(tagged) == digest
        return not there

    def push_chart(self, package: Path) -> str:
        """Push the chart, unless it is there; returns its digest. Raises ReleaseError where its version is another."""
        version = package.stem.removeprefix("segue-")
        reference = f"oci://{self.name}/{CHARTS}/segue"
        flags = ["--plain-http"] if self.plain_http else []
        with tempfile.TemporaryDirectory() as folder:
            pull = [self.helm, "pull", reference, "--version", version, "--destination", folder, *flags]
            found = subprocess.run(pull, capture_output=True, text=True, check=False)
            if found.returncode == 0:
                if Path(folder, package.name).read_bytes() != package.read_bytes():
                    raise ReleaseError(
                        f"{reference} has another chart of version {version}: raise the version"
                    )
                return _digest_in(found.stdout + found.stderr)
        if not _ABSENT.search(found.stderr):
            raise ReleaseError(f"{reference} does not say whether it has {version}: {found.stderr.strip()}")
        said = subprocess.run(
            [self.helm, "push", str(package), f"oci://{self.name}/{CHARTS}", *flags],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        if said.returncode != 0:
            raise ReleaseError(f"helm push failed: {said.stderr.strip()}")
        return _digest_in(said.stdout + said.stderr)

    def _tls(self, flag: str) -> list[str]:
        return [f"{flag}=false"] if self.plain_http else []


def publish(folder: Path, registry: Registry) -> dict[str, str]:
    """Publish a release that `release.make` has made for this registry; returns reference → digest.

    Raises ReleaseError where the chart names another registry, or a tag is taken.
    """
    record: dict[str, Any] = json.loads((folder / "release.json").read_text(encoding="utf-8"))
    if record["registry"] != registry.name:
        raise ReleaseError(
            f"{folder} was made for the registry {record['registry']}, which its chart names: make release "
            f"REGISTRY={registry.name}"
        )
    published = {}
    for tagged, digest in record["images"].items():
        new = registry.push_image(folder / "images", tagged, digest)
        published[f"{registry.name}/{tagged}"] = digest
        _say(f"{registry.name}/{tagged} {digest}{'' if new else ' was there'}")
    digest = registry.push_chart(folder / f"segue-{record['version']}.tgz")
    published[f"{registry.name}/{CHARTS}/segue:{record['version']}"] = digest
    _say(f"oci://{registry.name}/{CHARTS}/segue --version {record['version']} {digest}")
    return published


def sign(published: dict[str, str], folder: Path, key: str) -> None:
    """Sign by cosign what was published, and attach to each image the bill of materials that it has."""
    for reference, digest in published.items():
        name, _, tag = reference.rpartition(":")
        _run("cosign", "sign", "--yes", "--key", key, f"{name}@{digest}")
        bill = folder / f"{name.rpartition('/')[2]}-{tag}.cdx.json"
        if bill.exists():
            attest = ["--type", "cyclonedx", "--predicate", str(bill), f"{name}@{digest}"]
            _run("cosign", "attest", "--yes", "--key", key, *attest)


def _digest_in(text: str) -> str:
    found = re.search(r"sha256:[0-9a-f]{64}", text)
    assert found is not None, f"helm named no digest: {text}"
    return found[0]


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise ReleaseError(f"{command[0]} {command[1]} failed: {done.stderr.strip()}")


def _say(line: str) -> None:
    sys.stderr.write(f"publish: {line}\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m images.release.publish", allow_abbrev=False)
    parser.add_argument("registry", help="as in registry.example.com/ai")
    parser.add_argument("--plain-http", action="store_true", help="a registry without TLS")
    flags = parser.parse_args()
    try:
        for tool in ("skopeo", "helm"):
            if shutil.which(tool) is None:
                raise ReleaseError(f"it needs {tool}, which is not on PATH")
        published = publish(RELEASE, Registry(flags.registry, flags.plain_http))
        key = os.environ.get("COSIGN_KEY", "")
        if key and shutil.which("cosign"):
            sign(published, RELEASE, key)
        else:
            _say("nothing was signed: that takes cosign on PATH and COSIGN_KEY")
    except ReleaseError as error:
        sys.exit(f"publish: {error}")


if __name__ == "__main__":
    main()

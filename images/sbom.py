"""The bill of materials of an image (CycloneDX 1.6, JSON): the locked Python packages with their hashes, and Debian's.

    dpkg-query -W -f '${Package} ${Version}\\n' | python images/sbom.py NAME VERSION images/NAME.lock

What `images/build` calls for each image, with dpkg-query run inside it; prints the document. Knows no buildah.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any
from urllib.parse import quote


def bill(name: str, version: str, lock: str, debian: list[str]) -> dict[str, Any]:
    """The document of image `name`; `debian` has a line "package version" for each of Debian's packages."""
    command = [
        sys.executable,
        "-m",
        "cyclonedx_py",
        "requirements",
        lock,
        "--output-reproducible",
        "--sv",
        "1.6",
    ]
    document: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    document["metadata"]["component"] = {
        "type": "container",
        "name": name,
        "version": version,
        "bom-ref": name,
    }
    document["components"] += [_debian_package(*line.split()) for line in debian]
    return document


def _debian_package(name: str, version: str) -> dict[str, str]:
    purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}"
    return {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}


if __name__ == "__main__":
    NAME, VERSION, LOCK = sys.argv[1:]
    json.dump(bill(NAME, VERSION, LOCK, [line for line in sys.stdin if line.strip()]), sys.stdout, indent=1)

"""Exports images that buildah has into one OCI layout: there a digest is final, and copies keep it.

An image in buildah's store has layers that are not compressed yet; what it will be called in a registry is known once
they are. So a release compresses them once, and `release.publish` copies what came of it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

NAMES = {  # what `images/build` calls them → their names, and what stands behind the tag
    "router": ("segue-router", ""),
    "worker": ("segue-worker", ""),
    "worker-cuda": ("segue-worker", "-cuda"),
    "model": ("segue-model-smollm2", ""),
}


def tagged_name(name: str, tag: str) -> str:
    """`segue-worker:1.2.3-cuda` of `worker-cuda`."""
    image, suffix = NAMES[name]
    return f"{image}:{tag}{suffix}"


def export_image(tagged: str, layout: Path) -> str:
    """Write an image of registry `localhost` into an OCI layout, under its name with a dash for the colon.

    Returns its digest. Raises subprocess.CalledProcessError.
    """
    digest_file = layout.parent / ".digest"
    target = f"oci:{layout}:{reference_in_layout(tagged)}"
    command = ["buildah", "push", "--quiet", "--digestfile", str(digest_file), f"localhost/{tagged}", target]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    digest = digest_file.read_text(encoding="utf-8").strip()
    digest_file.unlink()
    return digest


def reference_in_layout(tagged: str) -> str:
    """What an image is called in a layout, where a colon would end the path."""
    return tagged.replace(":", "-")

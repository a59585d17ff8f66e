"""Reads CHANGELOG.md: the part of a version, as release notes and as the changes that Artifact Hub shows."""

from __future__ import annotations

import re

KINDS = {  # a heading of Keep a Changelog → what Artifact Hub calls it
    "Added": "added",
    "Changed": "changed",
    "Deprecated": "deprecated",
    "Removed": "removed",
    "Fixed": "fixed",
    "Security": "security",
}


def notes(changelog: str, version: str) -> str:
    """What has changed in a version, with its headings; of one that is not released, what stands under Unreleased.

    Raises ValueError where there is no such part.
    """
    heading = "Unreleased" if "-" in version else version
    found = re.search(
        rf"^## {re.escape(heading)}(?: [^\n]*)?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    if found is None or not found[1].strip():
        raise ValueError(f"CHANGELOG.md says nothing of {heading}: a release has a part `## {heading}`")
    return found[1].strip() + "\n"


def changes(text: str) -> list[dict[str, str]]:
    """The lines of `notes` as Artifact Hub takes them. What stands under *Upgrading* comes first, as changed."""
    found = []
    kind = "changed"
    for line in text.splitlines():
        if line.startswith("### "):
            kind = KINDS.get(line.removeprefix("### ").split()[0], "changed")
        elif line.startswith("- "):
            found.append({"kind": kind, "description": _plain(line.removeprefix("- "))})
    return found


def _plain(markdown: str) -> str:
    """A line without links, which lead nowhere outside the repository."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown)

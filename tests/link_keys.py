"""Link keys as an operator keeps them: a folder with one file for each role, which only its user can read."""

from __future__ import annotations

from pathlib import Path

from shared.links.keys import LinkKeys, LinkRole, new_key_files, parse_keys


def write_new_keys(folder: Path) -> None:
    """Draw the keys of a deployment into `router.pem` and `worker.pem`."""
    folder.mkdir(exist_ok=True)
    for role, content in new_key_files().items():
        path = folder / f"{role}.pem"
        path.touch(0o600, exist_ok=False)
        path.write_bytes(content)


def new_keys() -> dict[LinkRole, LinkKeys]:
    """The keys of a new deployment, by role."""
    return {role: parse_keys(content, role) for role, content in new_key_files().items()}

"""The locks hold what Segue asks for and no more: optional packages of a server are doors that nobody would watch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
WITH_EXTRAS = {
    "websockets",
    "watchfiles",
    "wsproto",
}  # what uvicorn[standard] brings, and Segue never imports


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(line) for group in groups for line in group]


def test_uvicorn_is_required_without_extras() -> None:
    found = [requirement for requirement in requirements() if requirement.name == "uvicorn"]
    assert len(found) == 1
    assert not found[0].extras


def test_the_routers_lock_has_no_package_of_uvicorns_extras() -> None:
    names = set(re.findall(r"^([\w.-]+)==", (ROOT / "images/router.lock").read_text(), re.MULTILINE))
    assert "uvicorn" in names
    assert not names & WITH_EXTRAS

"""FlashInfer with a known fault in what Segue calls serves nobody: neither locks nor range admit it, nor a worker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from shared.engine.attention.flashinfer_package import BAD_VERSIONS, check_version
from shared.primitives.errors import StartError

ROOT = Path(__file__).parents[4]
# All of 0.6 and the first of 0.7, as they were published.
PUBLISHED = [
    *(f"0.6.{patch}" for patch in range(1, 19)),
    "0.6.8.post1",
    "0.6.15.post1",
    "0.7.0",
    "0.7.0.post1",
]


def bad(version: str) -> list[str]:
    """The issues of a version."""
    return [
        each.issue for each in BAD_VERSIONS if SpecifierSet(each.versions).contains(version, prereleases=True)
    ]


def test_a_bad_version_ends_the_start_with_its_fault_and_issue() -> None:
    with pytest.raises(
        StartError, match=r"FlashInfer 0\.6\.13 must not serve: .* hang .* \(flashinfer#3610\)\. Install"
    ):
        check_version("0.6.13")
    check_version("0.6.14")


def test_every_entry_names_an_issue_and_a_published_version() -> None:
    for each in BAD_VERSIONS:
        assert re.fullmatch(r"[a-z-]+#\d+", each.issue)
        assert any(SpecifierSet(each.versions).contains(version) for version in PUBLISHED)


def test_the_range_of_the_project_admits_no_bad_version() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wanted = Requirement(re.search(r'"(flashinfer-python[^"]*)"', text)[1])  # type: ignore[index]
    admitted = [version for version in PUBLISHED if wanted.specifier.contains(version)]
    assert [version for version in admitted if bad(version)] == []
    assert "0.6.14" in admitted


@pytest.mark.parametrize("lock", ["worker-cuda", "dev"])
def test_no_lock_has_a_bad_version(lock: str) -> None:
    found = re.findall(
        r"^flashinfer-python==(\S+)", (ROOT / f"images/{lock}.lock").read_text(encoding="utf-8"), re.M
    )
    assert len(found) == 1
    assert bad(found[0]) == []

"""`make audit` finds a planted advisory, and never calls what it could not compare free of vulnerabilities."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from images.advisories import Advisories, DatabaseError
from tests.images.containerfiles import ROOT

LOCK = """# Made for a test.
jinja2==3.1.6 \\
    --hash=sha256:0137fb05990d35f1275a587e9aee6d56da821fc83491a0fb838183be43f66d6d
urllib3==2.8.0 \\
    --hash=sha256:0137fb05990d35f1275a587e9aee6d56da821fc83491a0fb838183be43f66d6e
"""


def advisory(name: str, *events: dict[str, str], **more: Any) -> dict[str, Any]:
    """An OSV record about a package of PyPI."""
    affected = {
        "package": {"ecosystem": "PyPI", "name": name},
        "ranges": [{"type": "ECOSYSTEM", "events": list(events)}],
    }
    return {
        "schema_version": "1.6.0",
        "id": f"PYSEC-{name}",
        "summary": "A flaw.",
        "affected": [affected],
    } | more


def database(folder: Path, *records: dict[str, Any]) -> Path:
    folder.mkdir()
    for at, record in enumerate(records):
        (folder / f"{at}.json").write_text(json.dumps(record))
    return folder


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "made.lock"
    path.write_text(LOCK)
    return path


def audit(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "images.audit", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_planted_advisory_is_found_and_ends_with_status_1(tmp_path: Path, lock: Path) -> None:
    planted = advisory("jinja2", {"introduced": "3"}, {"fixed": "3.2"}, aliases=["CVE-2026-1"])
    ran = audit("--db", database(tmp_path / "osv", planted), lock)
    assert ran.stdout.splitlines() == [
        "jinja2 3.1.6: PYSEC-jinja2, CVE-2026-1, mended in 3.2; in made.lock",
        "scanned 1 locks: 1 advisories",
    ]
    assert ran.returncode == 1


def test_the_zip_file_that_osv_exports_is_read(tmp_path: Path, lock: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("PYSEC.json", json.dumps(advisory("urllib3", {"introduced": "0"})))
    ran = audit("--db", tmp_path / "all.zip", lock)
    assert "urllib3 2.8.0: PYSEC-urllib3, mended in no version" in ran.stdout
    assert ran.returncode == 1


def test_advisories_about_other_versions_and_withdrawn_ones_are_none(tmp_path: Path, lock: Path) -> None:
    of_old = advisory("jinja2", {"introduced": "0"}, {"fixed": "3.1.6"})
    withdrawn = advisory("urllib3", {"introduced": "0"}, withdrawn="2026-01-01T00:00:00Z")
    ran = audit("--db", database(tmp_path / "osv", of_old, withdrawn), lock)
    assert (ran.stdout, ran.returncode) == ("scanned 1 locks: 0 advisories\n", 0)


@pytest.mark.parametrize("db", ["", "nothing-there", "http://127.0.0.1:9/v1/query", "empty"])
def test_without_a_database_nothing_is_called_scanned(tmp_path: Path, lock: Path, db: str) -> None:
    (tmp_path / "empty").mkdir()
    if db in ("empty", "nothing-there"):
        db = str(tmp_path / db)
    elif not db:
        lock.write_text("nowhere @ file:///nothing\n")  # so that this test asks no address outside
    ran = audit("--db", db, lock)
    assert ran.stderr.startswith("not scanned: ")
    assert len(ran.stderr.splitlines()) == 1
    assert (ran.stdout, ran.returncode) == ("", 2)


EVENTS = [{"introduced": "1.0"}, {"fixed": "1.5"}, {"introduced": "2.0"}, {"last_affected": "2.3"}]


@pytest.mark.parametrize(
    ("version", "affected"),
    [
        ("0.9", False),
        ("1.0", True),
        ("1.5rc1", True),
        ("1.5", False),
        ("2.0", True),
        ("2.3", True),
        ("2.3.1", False),
    ],
)
@pytest.mark.parametrize("order", [EVENTS, EVENTS[::-1]], ids=["in order", "backwards"])
def test_a_range_affects_what_osv_says(
    tmp_path: Path, order: list[dict[str, str]], version: str, affected: bool
) -> None:
    found = Advisories(database(tmp_path / "osv", advisory("some.Package", *order))).about(
        "some-package", version
    )
    assert bool(found) is affected


def test_listed_versions_count_and_other_ecosystems_do_not(tmp_path: Path) -> None:
    listed = {"package": {"ecosystem": "PyPI", "name": "a"}, "versions": ["1.0", "not a version"]}
    npm = {"package": {"ecosystem": "npm", "name": "b"}, "versions": ["1.0"]}
    advisories = Advisories(database(tmp_path / "osv", {"id": "X", "affected": [listed, npm]}))
    assert advisories.about("a", "1.0.0")
    assert not advisories.about("a", "1.1")
    assert not advisories.about("b", "1.0")


def test_a_database_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    with pytest.raises(DatabaseError, match="cannot be read as a folder or zip file of OSV records"):
        Advisories(tmp_path / "file")

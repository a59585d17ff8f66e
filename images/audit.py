"""Looks for known vulnerabilities of what the lock files name, by pip-audit: `make audit`, `make audit DB=…`.

DB is where the advisories are: a folder of OSV records or OSV's zip file for PyPI, the address of an OSV API, or `pypi`
for PyPI's own JSON API. Without it, OSV's API is asked. Exit status: 0 nothing is known, 1 something is, 2 not all
was scanned. pip-audit calls a package that its database does not know unaffected; here that is "not scanned".
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from images.advisories import Advisories, DatabaseError, served

LOCKS = Path(__file__).parent
ANSWER_SECONDS = 5  # for an answer about one package
OSV = "https://api.osv.dev/v1/query"
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


class NotScannedError(Exception):
    """The locks, or some of what they name, could not be compared with the database; the message is one sentence."""


def audit(lock: Path, *, pypi: bool = False, osv_url: str = OSV) -> list[dict[str, Any]]:
    """What pip-audit says about each package of a lock: `name`, `version`, `vulns`. Raises `NotScannedError`."""
    service = ["pypi"] if pypi else ["osv", "--osv-url", osv_url]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--format", "json"]
        command += ["--progress-spinner", "off", "--timeout", str(ANSWER_SECONDS), "--output", str(report)]
        command += ["--cache-dir", folder, "--vulnerability-service", *service, "--requirement", str(lock)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if not report.exists():
            reason = (ran.stderr.strip() or "pip-audit wrote no report").splitlines()[-1]
            raise NotScannedError(f"pip-audit could not compare {lock} with {service[-1]}: {reason[:300]}")
        packages: list[dict[str, Any]] = json.loads(report.read_text())["dependencies"]
    if unknown := [package for package in packages if "skip_reason" in package]:
        raise NotScannedError(f"{len(unknown)} packages of {lock}, the first: {unknown[0]['skip_reason']}")
    scanned = {(package["name"], package["version"]) for package in packages}
    if missing := set(_PINNED.findall(lock.read_text())) - scanned:
        raise NotScannedError(f"{len(missing)} packages of {lock}, the first: {' '.join(min(missing))}")
    return packages


def findings(packages: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each advisory: package, ids, and which version mends it."""
    return [
        f"{package['name']} {package['version']}: {', '.join([found['id'], *found['aliases']])}, "
        f"mended in {', '.join(found['fix_versions']) or 'no version'}"
        for package in packages
        for found in package["vulns"]
    ]


def main() -> int:
    """The command; see the head of this file."""
    parser = argparse.ArgumentParser(prog="make audit", description=__doc__)
    parser.add_argument("--db", default="", help="a folder, a zip file, an address, or pypi")
    parser.add_argument("locks", nargs="*", type=Path, default=sorted(LOCKS.glob("*.lock")))
    arguments = parser.parse_args()
    db = arguments.db
    found: dict[str, list[str]] = {}
    try:
        is_path = db not in ("", "pypi") and not db.startswith(("http://", "https://"))
        with served(Advisories(Path(db))) if is_path else nullcontext(db or OSV) as osv_url:
            for lock in arguments.locks:
                for line in findings(audit(lock, pypi=db == "pypi", osv_url=osv_url)):
                    found.setdefault(line, []).append(lock.name)
    except (DatabaseError, NotScannedError) as error:
        sys.stderr.write(f"not scanned: {error}\n")
        return 2
    sys.stdout.writelines(f"{line}; in {', '.join(locks)}\n" for line, locks in found.items())
    sys.stdout.write(f"scanned {len(arguments.locks)} locks: {len(found)} advisories\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

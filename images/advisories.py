"""A database of advisories on this disk, answered as OSV's API answers (https://google.github.io/osv.dev/post-v1-query/).

It is a folder of OSV records in JSON, or the zip file that OSV exports for PyPI. pip-audit asks an address, one package
at a time; `served` is such an address on loopback, for machines that reach no other. Which versions a record affects
follows the evaluation of OSV's schema (https://ossf.github.io/osv-schema/#evaluation).
"""

from __future__ import annotations

import json
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

Record = Mapping[str, Any]


class DatabaseError(Exception):
    """The database cannot be read, or holds no record; the message is one sentence."""


class Advisories:
    """The records that name packages of PyPI, by package."""

    def __init__(self, path: Path):
        """Read all of `path`; raises `DatabaseError`."""
        self._records: dict[str, list[Record]] = {}
        for record in _records(path):
            packages = (affected.get("package", {}) for affected in record.get("affected", []))
            names = {canonicalize_name(package["name"]) for package in packages if _is_pypi(package)}
            for name in names:
                self._records.setdefault(name, []).append(record)
        if not self._records:
            raise DatabaseError(
                f"{path} holds no advisory about a package of PyPI: expected OSV records, a folder or a zip file"
            )

    def about(self, name: str, version: str) -> list[Record]:
        """The records that affect this version of this package."""
        return [
            record
            for record in self._records.get(canonicalize_name(name), [])
            if any(_affects(affected, name, Version(version)) for affected in record["affected"])
        ]


@contextmanager
def served(advisories: Advisories) -> Iterator[str]:
    """The address of an OSV API on loopback that answers from `advisories`."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = advisories.about(asked["package"]["name"], asked["version"])
            body = json.dumps({"vulns": found} if found else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield "http://{}:{}/v1/query".format(*server.server_address)
        finally:
            server.shutdown()


def _records(path: Path) -> Iterator[Record]:
    try:
        if path.is_dir():
            for file in sorted(path.rglob("*.json")):
                yield json.loads(file.read_bytes())
        else:
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if name.endswith(".json"):
                        yield json.loads(archive.read(name))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DatabaseError(
            f"{path} cannot be read as a folder or zip file of OSV records: {error}"
        ) from None


def _is_pypi(package: Mapping[str, Any]) -> bool:
    return package.get("ecosystem") == "PyPI" and "name" in package


def _affects(affected: Mapping[str, Any], name: str, version: Version) -> bool:
    package = affected.get("package", {})
    if not _is_pypi(package) or canonicalize_name(package["name"]) != canonicalize_name(name):
        return False
    if any(_version(listed) == version for listed in affected.get("versions", [])):
        return True
    ranges = [each["events"] for each in affected.get("ranges", []) if each.get("type") == "ECOSYSTEM"]
    return any(_within(events, version) for events in ranges)


def _within(events: Sequence[Mapping[str, str]], version: Version) -> bool:
    """Whether `version` lies in a range: the last of its events that is not above it says so."""
    inside = False
    for kind, at in sorted(((*event.items(),)[0] for event in events), key=lambda event: _version(event[1])):
        if kind == "introduced" and _version(at) <= version:
            inside = True
        elif (kind == "fixed" and _version(at) <= version) or (
            kind == "last_affected" and _version(at) < version
        ):
            inside = False
    return inside


def _version(text: str) -> Version:
    """Versions that are none, as old records have, sort first; so does "0", the beginning of time."""
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0.dev0")

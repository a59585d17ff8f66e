"""docs/first-token.md counts the lines of each user's values as they are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "first-token.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\|[^|]*\| \[`([\w-]+\.yaml)`\]\(\.\./charts/segue/ci/\1\)[^|]*\| (\d+) \|", re.MULTILINE)


def lines_of(path: Path) -> int:
    """Lines that are neither empty nor a comment."""
    stripped = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return sum(bool(line) and not line.startswith("#") for line in stripped)


def test_the_lines_of_each_file_of_values_are_counted() -> None:
    found = {path.name: lines_of(path) for path in (ROOT / "charts" / "segue" / "ci").glob("*.yaml")}
    assert {name: int(lines) for name, lines in ROW.findall(PAGE)} == found, (
        "docs/first-token.md: write these numbers there, also in the table beside others"
    )


def test_the_table_beside_others_has_the_same_numbers() -> None:
    """A number of ours stands there only if the first table has it: those of one file alone are compared."""
    _, beside = PAGE.split("## Beside others")
    counted = dict(ROW.findall(PAGE))
    rows = {
        "no GPU": "cpu-demo.yaml",
        "the Hub, with a token": "gpu.yaml",
        "a proxy and a CA": "hub-behind-proxy.yaml",
        "an OCI artifact, mounted": "image-volume.yaml",
        "a folder of each node": "node-folder.yaml",
        "S3": "s3-by-fetch.yaml",
        "GGUF": "gguf.yaml",
        "RDMA": "rdma.yaml",
        "OpenShift": "openshift.yaml",
        "Argo CD": "argo-cd.yaml",
    }
    for row, name in rows.items():
        found = re.search(rf"^\| {re.escape(row)} \| (\d+)", beside, re.MULTILINE)
        assert found, row
        assert found[1] == counted[name], row

"""Writes `golden/*.yaml`: what each ready-made value set, and every value renders to, for reviews.

`python -m tests.charts.goldens` (or `make goldens`). What is random is masked by name, and so is the
version, which each release changes; nothing else is.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.charts.rendering import (
    CHART_VERSION,
    EVERY_GPU_VALUE,
    EVERY_VALUE,
    USER_SETS,
    VALUE_SETS,
    manifest,
)

WHOLE = (*VALUE_SETS, EVERY_VALUE, EVERY_GPU_VALUE)
GOLDEN = Path(__file__).parent / "golden"
_KEYS = re.compile(r"(?m)^(  (?:keys\.pem|keys|api-key): )\S+$")


def golden_file(values: str) -> Path:
    """Where the rendering of one value set is kept."""
    return GOLDEN / f"{values}.yaml"


def masked(text: str) -> str:
    """The text with the drawn keys and the version replaced."""
    return _KEYS.sub(r"\1MASKED", text).replace(CHART_VERSION, "VERSION")


def golden_text(values: str) -> str:
    """What is kept: all of it; of one user's values where they act: pods of routers and decode workers, and claims."""
    text = masked(manifest(values))
    if values in WHOLE:
        return text
    wanted = re.compile(
        r"(?m)^kind: PersistentVolumeClaim$|^kind: Deployment$(?s:.*?)^  name: segue-(router|decode)$"
    )
    return "---".join(["", *(document for document in text.split("\n---") if wanted.search(document))])


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in (*WHOLE, *USER_SETS):
        golden_file(name).write_text(golden_text(name), encoding="utf-8")

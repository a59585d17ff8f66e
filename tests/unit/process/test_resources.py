"""A container's limits count, not the figures of the machine around it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.process.resources import usable_cores


@pytest.mark.parametrize(
    ("content", "cores"), [("50000 100000", 1), ("100000 100000", 1), ("max 100000", None)]
)
def test_a_quota_bounds_the_cores(tmp_path: Path, content: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(content + "\n")
    assert usable_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))


def test_without_a_cgroup_the_machine_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))

"""A container's limits count, not the figures of the machine around it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.machine import usable_cores, usable_memory_bytes


@pytest.mark.parametrize(
    ("content", "cores"), [("50000 100000", 1), ("100000 100000", 1), ("max 100000", None)]
)
def test_a_quota_bounds_the_cores(tmp_path: Path, content: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(content + "\n")
    assert usable_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))


def test_without_a_cgroup_the_machine_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))
    assert usable_memory_bytes(tmp_path) > 0


def test_a_memory_limit_counts_less_what_is_used(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:   8000 kB\n")
    assert usable_memory_bytes(tmp_path, meminfo) == 8000 * 1024
    (tmp_path / "memory.max").write_text("4096000\n")
    (tmp_path / "memory.current").write_text("96000\n")
    assert usable_memory_bytes(tmp_path, meminfo) == 4_000_000

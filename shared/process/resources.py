"""How many cores and how much memory this process may use: what its control group allows, else the machine's figures.

In a container the machine's own figures do not apply, and there are two forms of limits. Version 1 of control
groups has a tree of folders for each controller, version 2 one tree for all. The limits of every parent hold too, so
the lowest one counts. This file is the only reader of control groups; what the memory is spent on, it does not know.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from shared.engine.config import Budget
from shared.primitives.errors import ConfigError

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")
NO_QUOTA = "-1"  # in version 1
PERIOD_MICROSECONDS = 100_000  # the kernel's default


def usable_cores(cgroup: Path = CGROUP, proc: Path = PROC) -> int:
    """Cores, at least 1. A limit of one and a half cores counts as two."""
    limits = [_core_limit(group) for group in _groups("cpu", cgroup, proc)]
    return max(1, math.ceil(min([len(os.sched_getaffinity(0)), *limits])))


def memory_budget(memory_bytes: int | None = None, cgroup: Path = CGROUP, proc: Path = PROC) -> Budget:
    """The given budget, or the limit of the control group, or half of the machine's free memory.

    Half, because prefill and decode often share a machine. Raises ConfigError where the machine does not say.
    """
    if memory_bytes is not None:
        return Budget(memory_bytes, "as it was given")
    free = _free_bytes(proc)
    limit = min((_memory_limit(group) for group in _groups("memory", cgroup, proc)), default=math.inf)
    if limit <= free:
        return Budget(int(limit), "the limit of its control group")
    return Budget(free // 2, f"half of the machine's {free / 2**30:.2f} GiB free")


def _groups(controller: str, cgroup: Path, proc: Path) -> Iterator[Path]:
    """The folders whose limits hold for this process: its control group and all parents, in both versions.

    In a container the kernel may name a group by its path on the host, while the container's root is that group.
    The root of each tree is therefore always among the folders; those that do not exist have no limits.
    """
    lines = ["0::/", f"0:{controller}:/", *_read(proc / "self" / "cgroup").splitlines()]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2, also beside version 1
            roots = [cgroup, cgroup / "unified"]
        elif controller in controllers.split(","):  # version 1: `cpu` is often mounted as `cpu,cpuacct`
            roots = [cgroup / controller, cgroup / controllers]
        else:
            continue
        for root in roots:
            group = root / path.lstrip("/")
            yield from (folder for folder in [group, *group.parents] if folder.is_relative_to(root))


def _core_limit(group: Path) -> float:
    """Cores; infinite where the group has no limit."""
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if quota in ("", "max"):
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    if quota in ("", NO_QUOTA):
        return math.inf
    return int(quota) / int(period or PERIOD_MICROSECONDS)


def _memory_limit(group: Path) -> float:
    """Bytes; infinite where the group has no limit. Version 1 writes a number larger than any machine's memory."""
    limits = [_read(group / name) for name in ("memory.max", "memory.limit_in_bytes")]
    return min((int(limit) for limit in limits if limit.isdecimal()), default=math.inf)


def _free_bytes(proc: Path) -> int:
    for line in _read(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ConfigError("/proc/meminfo does not say how much memory is free: set --memory-bytes")


def _read(file: Path) -> str:
    """The text of a file; empty where there is none."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""

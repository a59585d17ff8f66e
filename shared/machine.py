"""How many cores and how much memory this process may use: the cgroup's limits, else the machine's.

In a container the machine's own figures are somebody else's. Reads cgroup v2 files; a process outside any limit finds
none.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores, at least 1; a limit of half a core is one core."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = (_read(cgroup / "cpu.max") or "max").partition(" ")
    if quota != "max":
        cores = min(cores, math.ceil(int(quota) / int(period or 100_000)))
    return max(1, cores)


def usable_memory_bytes(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> int:
    """Bytes that are available now, without swapping, within the cgroup's limit."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _read(cgroup / "memory.max") or "max"
    if limit != "max":
        used = int(_read(cgroup / "memory.current") or 0)
        available = min(available, max(0, int(limit) - used))
    return available


def _read(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None

"""How many cores this process may use: the cgroup's limit, else the machine's.

In a container the machine's own figures are somebody else's. How much memory
there is, `shared.engine.memory_plan` says.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores, at least 1; a limit of half a core is one core."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = (_read(cgroup / "cpu.max") or "max").partition(" ")
    if quota != "max":
        cores = min(cores, math.ceil(int(quota) / int(period or 100_000)))
    return max(1, cores)


def _read(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None

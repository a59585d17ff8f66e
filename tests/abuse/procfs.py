"""What the kernel knows of a process of the deployment: its memory, its threads, its sockets, its limits.

The suite sees processes from outside: everything here is read from `/proc`, or set by `prlimit`.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LISTEN = "0A"  # the state of a listening socket in /proc/net/tcp


class PeakMemory:
    """Resident memory of a process from now on: what it has, and the most that it had."""

    def __init__(self, pid: int):
        self._pid = pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        self._before = status_bytes(pid, "VmRSS")

    def growth(self) -> int:
        """Bytes by which the peak exceeds what the process had at the beginning."""
        return status_bytes(self._pid, "VmHWM") - self._before


def status_bytes(pid: int, field: str) -> int:
    """A field of `/proc/PID/status`, such as VmRSS."""
    text = Path(f"/proc/{pid}/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    assert match, f"the kernel does not show {field}"
    return int(match.group(1)) << 10


def cpu_seconds(pid: int, thread: int | None = None) -> float:
    """CPU time of a process, or of one of its threads."""
    fields = _stat(f"{pid}/task/{thread}" if thread else str(pid))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def started_at(pid: int) -> float:
    """When the process started, in seconds since the machine did."""
    return int(_stat(str(pid))[19]) / os.sysconf("SC_CLK_TCK")


def _stat(folder: str) -> list[str]:
    """The fields of `stat` behind the name, from the state on."""
    return Path("/proc", folder, "stat").read_text().rpartition(")")[2].split()


def threads(pid: int) -> list[int]:
    """The ids of its threads; the first is the main one."""
    return sorted(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir())


def descriptors(pid: int) -> int:
    """How many descriptors it has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which it listens."""
    own = {_target(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in own:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def _target(link: Path) -> str:
    """Where a descriptor leads; it may close meanwhile."""
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""


@contextmanager
def limited(pid: int, limit: int, value: int) -> Iterator[None]:
    """A lower limit of a running process, as `prlimit` sets it. `limit` is a RLIMIT_* of `resource`."""
    before = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (value, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, limit, before)

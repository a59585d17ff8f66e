"""What happens to a pod on its node: its process there, and the kernel that takes it when memory ends.

PID 1 of a container ignores signals from inside; these come from the machine, which is the node of its own cluster.
"""

from __future__ import annotations

from pathlib import Path

from tests.cluster.kubernetes import Cluster, ClusterPod

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")  # control groups of version 1; those of version 2 lie one above
SPARE_BYTES = 8 << 20


def process_of(pod: ClusterPod) -> int:
    """The process `python -m <component>` of a pod, by its number on this machine."""
    found = [
        pid for pid in _processes(pod) if f"-m {pod.component}" in _read(pid, "cmdline").replace("\0", " ")
    ]
    assert len(found) == 1, f"{pod.name} has {len(found)} processes of its component on this machine"
    return found[0]


def let_memory_end(cluster: Cluster, pod: ClusterPod) -> None:
    """Leave the container no memory but what it uses, and use that up in it: the kernel takes its largest process."""
    group = next(line for line in _read(process_of(pod), "cgroup").splitlines() if _is_memory_group(line))
    folder = _memory_group(group.rpartition(":")[2])
    version_1 = (folder / "memory.usage_in_bytes").exists()
    usage, limit = (
        ("memory.usage_in_bytes", "memory.limit_in_bytes") if version_1 else ("memory.current", "memory.max")
    )
    (folder / limit).write_text(str(int((folder / usage).read_text()) + SPARE_BYTES))
    hog = f"bytearray({32 * SPARE_BYTES})"
    cluster.try_kubectl("exec", pod.name, "-c", pod.component, "--", "python", "-c", hog)


def oom_kills() -> int:
    """How many processes the kernel of this machine has taken because memory had ended."""
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counts["oom_kill"])


def is_running(pid: int) -> bool:
    """Whether there is such a process still."""
    return _read(pid, "cmdline") != ""


def _processes(pod: ClusterPod) -> list[int]:
    numbers = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    names = (pod.uid, pod.uid.replace("-", "_"))
    return [pid for pid in numbers if any(name in _read(pid, "cgroup") for name in names)]


def _is_memory_group(line: str) -> bool:
    return ":memory:" in line if MEMORY_GROUPS.exists() else line.startswith("0::")


def _memory_group(path: str) -> Path:
    root = MEMORY_GROUPS if MEMORY_GROUPS.exists() else MEMORY_GROUPS.parent
    return root / path.lstrip("/")


def _read(pid: int, name: str) -> str:
    """A file of a process; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""

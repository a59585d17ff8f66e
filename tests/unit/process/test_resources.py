"""A container's limits count, not the figures of the machine around it: in both versions of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.engine.config import Budget
from shared.process.resources import memory_budget, usable_cores

CORES = 8
FREE_KIB = 8 * 2**20
GIB = 2**30


class FakeMachine:
    """`/sys/fs/cgroup` and `/proc` in a folder: eight cores and 8 GiB of free memory."""

    def __init__(self, folder: Path):
        self.cgroup, self.proc = folder / "cgroup", folder / "proc"
        self.write(self.proc / "meminfo", f"MemTotal: 16777216 kB\nMemAvailable: {FREE_KIB} kB")

    def write(self, file: Path, text: str | int) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def belongs_to(self, *lines: str) -> None:
        """The process's control groups, as the kernel lists them."""
        self.write(self.proc / "self" / "cgroup", "\n".join(lines))

    def limit(self, group: str, **files: str | int) -> None:
        """Write the files of one control group; an underscore stands for the first dot."""
        for name, text in files.items():
            self.write(self.cgroup / group / name.replace("_", ".", 1), text)

    @property
    def cores(self) -> int:
        return usable_cores(self.cgroup, self.proc)

    @property
    def memory(self) -> Budget:
        return memory_budget(None, self.cgroup, self.proc)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)))
    return FakeMachine(tmp_path)


def test_without_limits_the_machine_counts(machine: FakeMachine) -> None:
    assert machine.cores == CORES
    assert machine.memory == Budget(4 * GIB, "half of the machine's 8.00 GiB free")


@pytest.mark.parametrize(
    ("content", "cores"),
    [("50000 100000", 1), ("100000 100000", 1), ("150000 100000", 2), ("max 100000", CORES)],
)
def test_a_quota_of_version_2_bounds_the_cores(machine: FakeMachine, content: str, cores: int) -> None:
    machine.limit("", cpu_max=content)
    assert machine.cores == cores


@pytest.mark.parametrize(("quota", "cores"), [(50_000, 1), (200_000, 2), (-1, CORES)])
@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct", "cpuacct,cpu"])
def test_a_quota_of_version_1_bounds_the_cores(
    machine: FakeMachine, controllers: str, quota: int, cores: int
) -> None:
    machine.belongs_to("5:memory:/docker/a", f"4:{controllers}:/docker/a", "0::/")
    machine.limit(f"{controllers}/docker/a", cpu_cfs_quota_us=quota, cpu_cfs_period_us=100_000)
    assert machine.cores == cores


def test_in_a_container_of_version_1_the_root_is_its_group(machine: FakeMachine) -> None:
    machine.belongs_to("4:cpu,cpuacct:/docker/a", "3:memory:/docker/a")
    machine.limit("cpu", cpu_cfs_quota_us=300_000, cpu_cfs_period_us=100_000)
    machine.limit("memory", memory_limit_in_bytes=GIB)
    assert machine.cores == 3
    assert machine.memory == Budget(GIB, "the limit of its control group")


def test_the_lowest_limit_of_all_parents_counts_in_version_1(machine: FakeMachine) -> None:
    machine.belongs_to("4:cpu:/pods/pod/container", "3:memory:/pods/pod/container")
    machine.limit("cpu/pods/pod/container", cpu_cfs_quota_us=400_000, cpu_cfs_period_us=100_000)
    machine.limit("cpu/pods/pod", cpu_cfs_quota_us=50_000, cpu_cfs_period_us=25_000)
    machine.limit("memory/pods/pod/container", memory_limit_in_bytes=9223372036854771712)
    machine.limit("memory/pods", memory_limit_in_bytes=3 * GIB)
    assert machine.cores == 2
    assert machine.memory.memory_bytes == 3 * GIB


def test_the_lowest_limit_of_all_parents_counts_in_version_2(machine: FakeMachine) -> None:
    machine.belongs_to("0::/pods/pod/container")
    machine.limit("pods/pod/container", cpu_max="max 100000", memory_max="max")
    machine.limit("pods/pod", cpu_max="250000 100000", memory_max=2 * GIB)
    machine.limit("pods", cpu_max="600000 100000", memory_max=5 * GIB)
    assert machine.cores == 3
    assert machine.memory.memory_bytes == 2 * GIB


def test_another_group_does_not_count(machine: FakeMachine) -> None:
    machine.belongs_to("4:cpu:/mine", "3:memory:/mine", "1:name=systemd:/other", "0::/mine")
    machine.limit("cpu/other", cpu_cfs_quota_us=100_000, cpu_cfs_period_us=100_000)
    machine.limit("memory/other", memory_limit_in_bytes=GIB)
    machine.limit("other", cpu_max="100000 100000", memory_max=GIB)
    assert machine.cores == CORES
    assert machine.memory.memory_bytes == 4 * GIB


def test_a_limit_above_the_free_memory_is_no_limit(machine: FakeMachine) -> None:
    machine.limit("", memory_max=64 * GIB)
    assert machine.memory == Budget(4 * GIB, "half of the machine's 8.00 GiB free")


def test_a_given_budget_wins(machine: FakeMachine) -> None:
    machine.limit("", memory_max=GIB)
    assert memory_budget(5, machine.cgroup, machine.proc) == Budget(5, "as it was given")


def test_this_machine_has_cores_and_a_budget() -> None:
    assert usable_cores() > 0
    assert memory_budget().memory_bytes > 0

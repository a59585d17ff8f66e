"""Links between GPUs, read from what nvidia-smi prints of them; the driver itself is not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.local import doctor_command
from shared.local.gpu_links import described, has_slow, links_in, read_topology

NVLINK = """\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPXB\t0-55\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t56-111\t1\t\tN/A
NIC0\tPXB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""
MIXED = """\tGPU0\tGPU1\tGPU2\tCPU Affinity
GPU0\t X \tNV4\tSYS\t0-31
GPU1\tNV4\t X \tSYS\t0-31
GPU2\tSYS\tSYS\t X \t32-63
"""


def test_each_pair_has_its_link() -> None:
    assert links_in(NVLINK) == {("GPU0", "GPU1"): "NV18"}
    assert described(links_in(NVLINK)) == "NV18 between any two"
    mixed = links_in(MIXED)
    assert described(mixed) == "NV4 between GPU0-GPU1, SYS between GPU0-GPU2 GPU1-GPU2"
    assert (has_slow(links_in(NVLINK)), has_slow(mixed)) == (False, True)


@pytest.mark.parametrize(
    "said", ["", "\n", "GPU0\n", "\tGPU0\nGPU0\t X ", "\tGPU0\tGPU1\nGPU0\t X ", "No devices"]
)
def test_what_has_no_pairs_has_no_links(said: str) -> None:
    assert links_in(said) == {}


@pytest.mark.parametrize(
    ("topology", "status", "words"),
    [
        (NVLINK, "ok", "loaded; NV18 between any two"),
        (MIXED, "warn", "loaded; NV4 between GPU0-GPU1, SYS between"),
        ("", "ok", "the NVIDIA driver is loaded"),
    ],
)
def test_the_doctor_says_how_gpus_reach_each_other(
    topology: str, status: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a program of that name which prints such a table, or fails."""
    program = tmp_path / "nvidia-smi"
    (tmp_path / "table").write_text(topology)
    program.write_text(
        f'#!/bin/sh\n[ "$1 $2" = "topo -m" ] && [ -s {tmp_path}/table ] && cat {tmp_path}/table\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor_command, "has_driver", lambda: True)
    assert read_topology() == topology
    found = doctor_command.gpu()
    assert (found.state, words in found.found) == (status, True)
    assert bool(found.remedy) == (status == "warn")


def test_without_a_driver_there_is_nothing_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "has_driver", lambda: False)
    assert doctor_command.gpu().found == "none: the CPU computes"

"""Everything that wants a GPU, in one go of thirty minutes, into one report.

python -m tests.gpu --report gpu.txt                 a GPU; every part has a bound, and what fails does not end the rest
python -m tests.gpu --report gpu.txt --rehearse      the same on CPU with tiny models: shows that it runs
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from time import monotonic

import torch

PACKAGES = ("torch", "flashinfer-python", "nixl", "nixl-cu13", "cuda-bindings", "transformers")


@dataclass(frozen=True, slots=True)
class Part:
    """A command and the minutes that it may take."""

    name: str
    minutes: float
    module: str
    flags: tuple[str, ...] = ()
    rehearsed: tuple[str, ...] | None = None  # its flags on CPU; None: as on a GPU


OFFLINE_ON_CPU = (
    "--model",
    "tiny",
    "--device",
    "cuda-on-cpu",
    "--sequences",
    "4",
    "--longest",
    "40",
    "--pages",
    "200",
)
PARTS = (
    Part("arithmetic", 5, "pytest", ("-q", "-x", "tests/gpu/test_arithmetic.py")),
    Part("the device", 4, "pytest", ("-q", "tests/gpu/test_cuda_device.py")),
    Part("attention by layout", 4, "tests.benchmarks.attention", (), ("--rehearse",)),
    Part("VRAM between processes", 4, "pytest", ("-q", "-s", "tests/gpu/test_vram_transfer.py")),
    Part("offline, Qwen3-0.6B", 5, "tests.benchmarks.offline", ("--model", "0.6B"), OFFLINE_ON_CPU),
    Part(
        "offline, Qwen3-14B", 7, "tests.benchmarks.offline", ("--model", "14B", "--runs", "1"), OFFLINE_ON_CPU
    ),
)


def main() -> None:
    """See the head of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    if not given.rehearse and not torch.cuda.is_available():
        parser.exit(0, "skipped: torch finds no GPU; --rehearse runs the same on CPU\n")
    with given.report.open("w", encoding="utf-8") as report:
        report.write(f"{machine()}\n")
        for part in PARTS:
            report.write(f"\n== {part.name}\n")
            report.flush()
            report.write(outcome(part, rehearse=given.rehearse))
            report.flush()
    sys.stdout.write(f"written to {given.report}\n")


def machine() -> str:
    """What it runs on, and with what."""
    gpu = "no GPU"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        gpu = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, {memory:.0f} GiB"
    return "\n".join(
        (gpu, f"Python {platform.python_version()}, CUDA {torch.version.cuda}", *map(_version, PACKAGES))
    )


def outcome(part: Part, *, rehearse: bool) -> str:
    """What the part printed, and how it ended."""
    flags = part.rehearsed if rehearse and part.rehearsed is not None else part.flags
    began = monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", part.module, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60 * part.minutes,
            check=False,
        )
        printed, end = done.stdout, f"exit {done.returncode}"
    except subprocess.TimeoutExpired as late:
        printed, end = (late.stdout or b"").decode(errors="replace"), f"ended after {part.minutes:g} minutes"
    return f"{printed.rstrip()}\n-- {end}, {monotonic() - began:.0f} s\n"


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} is not installed"


if __name__ == "__main__":
    main()

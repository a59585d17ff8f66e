"""Everything that wants a GPU, part by part, into one report.

python -m tests.gpu --report gpu.txt                        a GPU; what fails or hangs does not end the rest
python -m tests.gpu --report gpu.txt --part compile         one part, or more: each takes nine minutes at most
python -m tests.gpu --report gpu.txt --rehearse             the same on CPU with tiny models: shows that it runs

Figures are in the report as soon as they are printed. `compile` comes first: what FlashInfer lacks would else be
compiled at the first call that needs it, in the minutes of another part. Our own kernels come before FlashInfer's.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from time import monotonic
from typing import IO

import torch

PACKAGES = ("torch", "flashinfer-python", "nixl", "nixl-cu13", "cuda-bindings", "transformers")
PART_MINUTES_MAX = 9


@dataclass(frozen=True, slots=True)
class Part:
    """A command and the minutes that it may take."""

    name: str
    minutes: float
    module: str
    flags: tuple[str, ...] = ()
    rehearsed: tuple[str, ...] | None = None  # its flags on CPU; None: as on a GPU


def pytest_part(name: str, minutes: float, *flags: str, only: str = "") -> Part:
    """Tests: those on a GPU alone where there is one, and a test that hangs ends by itself."""
    common = ("-q", "-s", "--timeout=120", *flags)
    wanted = ("-k", f"({only}) and not cpu" if only else "not cpu")
    return Part(name, minutes, "pytest", (*common, *wanted), (*common, *(("-k", only) if only else ())))


def offline(model: str, parts: str, minutes: float, *flags: str) -> Part:
    """Figures of a model, or of a tiny one on CPU."""
    asked = ("--parts", parts, *flags)
    tiny = (
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
    name = f"offline {model} {parts}"
    return Part(name, minutes, "tests.benchmarks.gpu.offline", ("--model", model, *asked), (*tiny, *asked))


def compiled(name: str, dtype: str) -> Part:
    """The modules of FlashInfer for all models of the parts, in one dtype; on CPU their names."""
    flags = ("--dtype", dtype, "--head-dim", "128", "64")
    return Part(name, 9, "shared.engine.cuda.aot", flags, ("--arch", "9.0a", "--list", *flags))


ARITHMETIC = "tests/gpu/test_arithmetic.py"
PARTS = (
    compiled("compile", "bfloat16"),
    pytest_part("kernels", 3, ARITHMETIC, only="kernels or words or told"),
    pytest_part("device", 4, "tests/gpu/test_cuda_device.py"),
    offline("0.6B", "steps,prompts,alone,filtered", 6, "--runs", "2"),
    offline("0.6B", "profile", 3),
    Part(
        "deployment", 6, "tests.gpu.deployment", (), ("--model", "tiny", "--device", "cuda-on-cpu", "--small")
    ),
    pytest_part("filters", 3, ARITHMETIC, only="filters"),
    pytest_part("fp8", 3, ARITHMETIC, only="fp8"),
    pytest_part("int4", 3, ARITHMETIC, only="int4"),
    pytest_part("experts", 6, ARITHMETIC, "tests/gpu/test_packed_experts.py", only="experts"),
    pytest_part("families in bfloat16", 5, ARITHMETIC, only="transformers and bfloat16"),
    Part("attention by layout", 4, "tests.benchmarks.gpu.attention", (), ("--rehearse",)),
    pytest_part("VRAM between processes", 4, "tests/gpu/test_vram_transfer.py"),
    offline("14B", "steps,alone", 7, "--runs", "1"),
    offline("0.6B", "disaggregated", 4, "--runs", "1"),
    offline("14B", "disaggregated", 6, "--runs", "1"),
    compiled("compile float16", "float16"),
    pytest_part("families in float16", 5, ARITHMETIC, only="transformers and float16 and not bfloat16"),
)


def main() -> None:
    """See the head of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--report", type=Path, required=True, help="with --part it is added to, else written anew"
    )
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--part", action="append", choices=[part.name for part in PARTS], help="default: all")
    given = parser.parse_args()
    if not given.rehearse and not torch.cuda.is_available():
        parser.exit(0, "skipped: torch finds no GPU; --rehearse runs the same on CPU\n")
    with given.report.open("a" if given.part else "w", encoding="utf-8") as report:
        report.write(f"{machine()}\n")
        for part in PARTS:
            if not given.part or part.name in given.part:
                run(part, report, rehearse=given.rehearse)
    sys.stdout.write(f"written to {given.report}\n")


def machine() -> str:
    """What it runs on, and with what."""
    gpu = "no GPU"
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        gpu = f"{torch.cuda.get_device_name()}, compute capability {architecture()}, {memory:.0f} GiB"
    return "\n".join(
        (gpu, f"Python {platform.python_version()}, CUDA {torch.version.cuda}", *map(_version, PACKAGES))
    )


def architecture() -> str:
    """The GPU's, as FlashInfer wants it named: from 9.0 on with the features of just that one."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}{'a' if major >= 9 else ''}"


def run(part: Part, report: IO[str], *, rehearse: bool) -> None:
    """Have the part write into the report, and write how it ended."""
    flags = part.rehearsed if rehearse and part.rehearsed is not None else part.flags
    if part.module == "shared.engine.cuda.aot" and not rehearse:
        flags = ("--arch", architecture(), *flags)
    report.write(f"\n== {part.name}\n")
    report.flush()
    began = monotonic()
    command = [sys.executable, "-m", part.module, *flags]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(
            command,
            stdout=report,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=60 * part.minutes,
            check=False,
        )
        end = f"exit {done.returncode}"
    except subprocess.TimeoutExpired:
        end = f"ended after {part.minutes:g} minutes"
    report.write(f"-- {end}, {monotonic() - began:.0f} s\n")
    report.flush()


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} is not installed"


if __name__ == "__main__":
    main()

"""Compiles the kernels into the cache, once for each source, set of flags and machine type.

The result is a plain shared library with a C interface. It needs no headers of Python or torch, so it compiles in
seconds and does not depend on their versions. `python -m shared.engine.native.build FOLDER` compiles ahead of time, for
an image that will have no compiler. `BuildError` says why the kernels cannot be compiled.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.primitives.errors import ConfigError

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-w")
GCC_FLAGS = ["-fira-region=all"]  # without it gcc 12 uses 16 of 32 registers and keeps sums in memory
COMPILE_SECONDS_MAX = 300


@dataclass(frozen=True)
class InstructionSet:
    """What the kernels are compiled for, and what a CPU must have to run them."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]  # as /proc/cpuinfo names them


# Best first. The first two compute the same bits: both fuse products into sums, in the same order.
INSTRUCTION_SETS = (
    InstructionSet(
        "avx512",
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"}),
    ),
    InstructionSet("avx2", ("-mavx2", "-mfma", "-mf16c"), frozenset({"avx2", "fma", "f16c"})),
    InstructionSet("plain", (), frozenset()),
)


class BuildError(Exception):
    """The kernels cannot be compiled here; the message says why."""


def choose(name: str = "auto") -> InstructionSet:
    """The best instruction set of this CPU, or the one named; `ConfigError` if the CPU lacks it."""
    flags = _cpu_flags()
    if name == "auto":
        return next(found for found in INSTRUCTION_SETS if found.needs <= flags)
    for found in INSTRUCTION_SETS:
        if found.name == name:
            if missing := sorted(found.needs - flags):
                raise ConfigError(f"this CPU cannot run {name} kernels: it lacks {', '.join(missing)}")
            return found
    names = ", ".join(found.name for found in INSTRUCTION_SETS)
    raise ConfigError(f"unknown instruction set: {name}; expected auto, {names}")


def build(
    instruction_set: InstructionSet, folder: str = "", on_compile: Callable[[], None] = lambda: None
) -> Path:
    """The compiled library, from `folder` (empty: the user's cache) if it is there; else `on_compile` is called.

    Raises `BuildError` if it is not, and there is no compiler or it fails.
    """
    try:
        target = (
            Path(folder) if folder else _cache_folder()
        ) / f"{instruction_set.name}-{_fingerprint(instruction_set)}.so"
        if not target.exists():
            on_compile()
            target.parent.mkdir(parents=True, exist_ok=True)
            with (target.parent / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # several workers start at once: one compiles
                if not target.exists():
                    _compile(instruction_set, target)
        return target
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:  # RuntimeError: a user without a home
        raise BuildError(f"the kernels cannot be compiled into the cache: {error}") from None


def _compile(instruction_set: InstructionSet, target: Path) -> None:
    given = os.environ.get("CXX")
    compiler = shlex.split(given) if given else [shutil.which("g++") or "clang++"]
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"no C++ compiler found ({compiler[0]}): install g++ 12 or newer, or set CXX")
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        fresh = Path(temporary) / target.name
        gcc = [] if "clang" in _version_of(compiler) else GCC_FLAGS
        sources = map(str, sorted(SOURCES.glob("*.cpp")))
        command = [*compiler, *FLAGS, *gcc, *instruction_set.flags, *sources, "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS_MAX)
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), "no error named")
            raise BuildError(f"{compiler[0]} failed: {reason.strip()}")
        fresh.rename(target)


def _version_of(compiler: list[str]) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60).stdout


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "segue" / "kernels"


def _fingerprint(instruction_set: InstructionSet) -> str:
    """Digest of everything but the compiler: an image without one must find what another machine compiled."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr((FLAGS, GCC_FLAGS, instruction_set.flags, platform.machine())).encode())
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def main() -> int:
    """Compile for every instruction set; one sentence and status 1 if that fails."""
    parser = argparse.ArgumentParser(
        prog="python -m shared.engine.native.build", description="Compile the kernels."
    )
    parser.add_argument(
        "folder", nargs="?", default="", help="for the workers' --kernels-folder; else the cache"
    )
    arguments = parser.parse_args()
    for instruction_set in INSTRUCTION_SETS:
        try:
            sys.stdout.write(f"{build(instruction_set, arguments.folder)}\n")
        except BuildError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""CUDA sources of ours compiled for CPUs, and launched as on a GPU: the same text, the same pointers to arguments."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

_HEADER = Path(__file__).with_name("cuda_on_cpu.h")
_KERNEL = re.compile(r"__global__ (?:__launch_bounds__\([^)]*\) )?void (\w+)\(")
# Threads of these wait for each other, and may be any number; a warp of those waits for itself.
_BY_BLOCK = {"plan_experts", "highest_of_parts", "draw_of_parts", "filter_rows", "logprobs"}
_BY_WARP = ("write_heads", "gemv", "multiply", "many", "round_", "route_")


def skip_without_compiler() -> None:
    """Skip the test where there is no g++."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile with")


@cache
def kernels_of(source: Path) -> list[str]:
    """The names of a source's kernels."""
    return _KERNEL.findall(expanded(source))


def expanded(source: Path) -> str:
    """The text of a source with what it includes, as a compiler sees it."""
    skip_without_compiler()
    expand = ["g++", "-E", "-P", "-x", "c++", str(source)]
    return subprocess.run(expand, check=True, capture_output=True, text=True).stdout


def waits(kernel: str) -> str:
    """Whether threads of a kernel wait for each other, as C++ has it."""
    return str(kernel in _BY_BLOCK or kernel.startswith(_BY_WARP)).lower()


def compile_for_host(source: Path, folder: Path) -> Path:
    """The library of a source, for `HostLaunch`."""
    launchers = "".join(
        f'extern "C" void launch_{name}(int blocks, int threads, void** arguments) {{'
        f" launch({name}, blocks, threads, {waits(name)}, arguments); }}\n"
        for name in kernels_of(source)
    )
    text = folder / f"{source.stem}.cpp"
    text.write_text(f'#include "{_HEADER}"\n#include "{source}"\n{launchers}')
    library = folder / f"{source.stem}.so"
    # As NVRTC reads them. Most libraries run once, for a mistake: -O1 takes twice as long to compile.
    flags = ["-std=c++17", "-Og", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, "-o", library, text], check=True)
    return library


def with_headers(source: Path, folder: Path, right: str, wrong: str) -> Path:
    """A copy of a source in which one text is another, beside the headers that it includes."""
    for header in source.parent.glob("*.cuh"):
        (folder / header.name).write_text(header.read_text().replace(right, wrong))
    changed = folder / source.name
    changed.write_text(source.read_text().replace(right, wrong))
    return changed


class HostLaunch:
    """`Launch` on this CPU; where all of a block's threads wait, with `threads` of them, not those asked for."""

    def __init__(self, library: Path, threads: int = 1) -> None:
        self._library = ctypes.CDLL(str(library))
        self._threads = threads

    def __call__(
        self, name: str, blocks: int, threads: int, arguments: ctypes.Array[ctypes.c_void_p]
    ) -> None:
        """See `Launch`."""
        launch = getattr(self._library, f"launch_{name}")
        launch(blocks, self._threads if name in _BY_BLOCK else threads, arguments)

"""`step_kernels.cu` compiled for CPUs, and launched as on a GPU: the same text, the same pointers to arguments."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from shared.engine.cuda.step_kernels import SOURCE

_HEADER = Path(__file__).with_name("cuda_on_cpu.h")
_KERNELS = {
    "highest_of_parts": True,
    "draw_of_parts": True,
    "choose_tokens": False,
    "filter_rows": True,
    "logprobs": True,
    "prepare_decode": False,
    "write_words": False,
}  # do threads wait for each other?


def skip_without_compiler() -> None:
    """Skip the test where there is no g++."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile with")


def compile_for_host(folder: Path) -> Path:
    """The library, for `HostLaunch`."""
    skip_without_compiler()
    launchers = "".join(
        f'extern "C" void launch_{name}(int blocks, int threads, void** arguments) {{'
        f" launch({name}, blocks, threads, {str(waiting).lower()}, arguments); }}\n"
        for name, waiting in _KERNELS.items()
    )
    text = folder / "step_kernels.cpp"
    text.write_text(f'#include "{_HEADER}"\n#include "{SOURCE}"\n{launchers}')
    library = folder / "step_kernels.so"
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["g++", *flags, "-o", library, text], check=True)
    return library


class HostLaunch:
    """`Launch` on this CPU; where threads wait for each other, with `threads` of them instead of those asked for."""

    def __init__(self, library: Path, threads: int = 1) -> None:
        self._library = ctypes.CDLL(str(library))
        self._threads = threads

    def __call__(
        self, name: str, blocks: int, threads: int, arguments: ctypes.Array[ctypes.c_void_p]
    ) -> None:
        """See `Launch`."""
        if _KERNELS[name]:
            threads = self._threads
        getattr(self._library, f"launch_{name}")(blocks, threads, arguments)

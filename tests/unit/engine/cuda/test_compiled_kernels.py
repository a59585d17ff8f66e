"""Our CUDA sources are compiled for each architecture, and the driver gets their kernels and arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.engine.cuda import gemv, head_kernels, int4_tiles, packed_experts, step_kernels
from shared.engine.cuda.compiled_kernels import compile_for
from shared.primitives.errors import StartError
from tests.unit.engine.cuda.host_kernels import kernels_of, skip_without_compiler


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(
    "source",
    [each.SOURCE for each in (step_kernels, head_kernels, gemv, int4_tiles, packed_experts)],
    ids=lambda path: path.stem,
)
def test_nvrtc_compiles_the_kernels(source: Path, architecture: str) -> None:
    try:
        cubin = compile_for(source, architecture)
    except StartError as error:
        if "missing" not in str(error):
            raise
        pytest.skip(str(error))
    assert cubin.startswith(b"\x7fELF")
    assert all(name.encode() in cubin for name in kernels_of(source))


LAUNCH = """
from types import SimpleNamespace
import torch
from shared.engine.cuda.compiled_kernels import LoadedKernels, compile_for
from shared.engine.cuda.step_kernels import SOURCE, CudaKernels
from shared.primitives.errors import InvariantError

torch.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=5)
loaded = LoadedKernels(compile_for(SOURCE, "sm_90"), overlaps=True)
kernels = CudaKernels(loaded)
for count, captured in ((300, False), (300, True), (4, False)):
    torch.cuda.is_current_stream_capturing = lambda: captured
    try:
        kernels.write_words(torch.full((count, 2), 6).int(), torch.full((9,), 8).int())
    except InvariantError as error:
        print(error, flush=True)
"""


def test_the_driver_gets_the_kernels_and_their_arguments(tmp_path: Path) -> None:
    """By the real bindings, from a driver that says what it is given."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    skip_without_compiler()
    source = Path(__file__).with_name("fake_driver.c")
    flags = ["-shared", "-fPIC", "-w", "-x", "c", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["g++", *flags, "-o", tmp_path / "libcuda.so.1", source, "-ldl"], check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", LAUNCH]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    launch = "launch 9: {} 1 1 blocks of 256 1 1, 0 bytes, stream 5, arguments 6, {}, 8, no more"
    assert found.stdout.splitlines() == [
        "load a cubin",
        "find write_words in 7",
        launch.format(2, 300),
        "with attribute 6: 1, 1 in all: " + launch.format(2, 300),  # programmatic stream serialization
        launch.format(1, 4),
        "the driver refused write_words with 1 blocks of 256: CUDA_ERROR_ILLEGAL_ADDRESS",
    ]

"""Our CUDA sources are compiled for each architecture, and the driver gets their kernels and arguments."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from shared.engine.cuda.kernels import (
    expert_routing,
    gemv,
    head_kernels,
    int4_tiles,
    packed_experts,
    step_kernels,
)
from shared.engine.cuda.kernels.compiled_kernels import compile_for
from shared.primitives.errors import StartError
from tests.unit.engine.cuda.kernels.host_kernels import kernels_of, skip_without_compiler

compiled = cache(compile_for)  # both tests look at most of these: NVRTC takes a second or two for each


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(
    "source",
    [each.SOURCE for each in (step_kernels, head_kernels, gemv, int4_tiles, packed_experts, expert_routing)],
    ids=lambda path: path.stem,
)
def test_nvrtc_compiles_the_kernels(source: Path, architecture: str) -> None:
    try:
        cubin = compiled(source, architecture)
    except StartError as error:
        if "missing" not in str(error):
            raise
        pytest.skip(str(error))
    assert cubin.startswith(b"\x7fELF")
    assert all(name.encode() in cubin for name in kernels_of(source))


# Loads that are asked for before one of them is waited for, at least, and how many bytes each thread's has at least.
# No vector is loaded of a vocabulary, whose rows may begin anywhere; a warp's loads lie side by side.
IN_FLIGHT = {
    "highest_of_parts": (4, 4),
    "draw_of_parts": (4, 4),
    "filter_rows": (4, 4),
    "logprobs": (4, 4),
    "write_heads_bfloat16_256": (4, 16),
    "write_heads_bfloat16_128": (2, 16),
    "gemv_bfloat16_bfloat16_1": (12, 16),
    "gemv_bfloat16_float32_4": (12, 16),
    "multiply_mxfp4_8": (8, 16),
    "multiply_fp8_8": (8, 16),
    "multiply_int4_8": (8, 16),
}
SOURCES = [each.SOURCE for each in (step_kernels, head_kernels, gemv, packed_experts)]
LOCAL = {0x983, 0x387}  # opcodes of loads from local memory, and of stores
LDG, LDG_BYTES = 0x981, {4: 4, 5: 8, 6: 16}  # of machine code: the opcode, and widths by their number


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_kernels_that_read_much_ask_for_several_loads_at_a_time(architecture: str) -> None:
    try:
        found = {name: code for source in SOURCES for name, code in codes_of(source, architecture)}
    except StartError as error:
        if "missing" not in str(error):
            raise
        pytest.skip(str(error))
    for name, (least, size) in IN_FLIGHT.items():
        assert loads_in_flight(found[name], size) >= least, name
    assert loads_in_flight(found["write_words"], 4) < 4, "few are seen where there are few"
    assert loads_in_flight(found["filter_rows"], 16) == 0, "the width is seen"


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_the_choice_of_experts_keeps_all_numbers_in_registers(architecture: str) -> None:
    """What is looked up by a number that was computed lies in local memory, and each choice would wait for it."""
    try:
        found = dict(codes_of(expert_routing.SOURCE, architecture))
    except StartError as error:
        if "missing" not in str(error):
            raise
        pytest.skip(str(error))
    in_memory = {name for name, code in found.items() if LOCAL & {low & 0xFFF for low, _ in words_of(code)}}
    assert in_memory == {"route_experts_16"}, "those of 257 experts and more are seen to have too many"


def words_of(code: bytes) -> Iterator[tuple[int, ...]]:
    """Instructions, each of two words, the lower first."""
    return struct.iter_unpack("<QQ", code)


def codes_of(source: Path, architecture: str) -> Iterator[tuple[str, bytes]]:
    """The machine code of each kernel: the sections `.text.NAME` of an ELF file of 64 bits."""
    cubin = compiled(source, architecture)
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    count, of_names = struct.unpack_from("<HH", cubin, 0x3C)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + 64 * number) for number in range(count)]
    names = sections[of_names][4]
    for name, _, _, _, offset, size in sections:
        found = cubin[names + name : cubin.index(0, names + name)].decode()
        if found.startswith(".text."):
            yield found.removeprefix(".text."), cubin[offset : offset + size]


def loads_in_flight(code: bytes, size: int) -> int:
    """The most loads of at least `size` bytes, in order of the code, that no instruction has waited for.

    An instruction has 128 bits (since Volta). A load names the barrier that its arrival releases in bits 110 to 112;
    bits 116 to 121 of an instruction are those that it waits for (Jia et al., 2018).
    """
    waiting, most = dict.fromkeys(range(8), 0), 0
    for low, high in words_of(code):
        for barrier in range(6):
            if high >> 52 + barrier & 1:
                waiting[barrier] = 0
        if low & 0xFFF == LDG and LDG_BYTES.get(high >> 9 & 7, 0) >= size:
            waiting[high >> 46 & 7] += 1
            most = max(most, sum(waiting.values()))
    return most


LAUNCH = """
from types import SimpleNamespace
import torch
from shared.engine.cuda.kernels.compiled_kernels import LoadedKernels, compile_for
from shared.engine.cuda.kernels.step_kernels import SOURCE, CudaKernels
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

"""CUDA sources of our own: compiled at start for the GPU that is there, loaded, launched.

NVRTC compiles them, so an image needs no nvcc and no header; it and `cuda-bindings` come with torch on CUDA. Products
are not fused into sums: results are then those of the same arithmetic in torch. Tests compile the same sources for
CPUs, launch them through the same code, and have NVRTC compile them for five architectures; `tests/gpu` compares on a
GPU.
"""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shared.engine.streams import Work
from shared.primitives.errors import InvariantError, StartError

_POINTER = ctypes.c_void_p
Number = ctypes.c_int | ctypes.c_longlong | ctypes.c_float
Argument = Tensor | Number | None  # None: a null pointer


class Launch(Protocol):
    """Runs a kernel of a source."""

    def __call__(
        self, name: str, blocks: int, threads: int, arguments: ctypes.Array[ctypes.c_void_p]
    ) -> None:
        """Launch it on torch's current stream; `arguments` are pointers to the arguments, as cuLaunchKernel takes them.

        They are read before this returns.
        """


def run_kernel(launch: Launch, name: str, blocks: int, threads: int, *arguments: Argument) -> None:
    """Launch a kernel with tensors, by their addresses, and numbers."""
    prepare_kernel(launch, name, blocks, threads, *arguments)()


def prepare_kernel(launch: Launch, name: str, blocks: int, threads: int, *arguments: Argument) -> Work:
    """What launches a kernel with the same tensors and numbers each time. It keeps them."""
    values = [
        _POINTER(each.data_ptr()) if isinstance(each, Tensor) else _POINTER() if each is None else each
        for each in arguments
    ]
    pointers = (_POINTER * len(values))(*map(ctypes.addressof, values))
    return partial(_launch, launch, name, blocks, threads, pointers, (values, arguments))


def _launch(
    launch: Launch,
    name: str,
    blocks: int,
    threads: int,
    pointers: ctypes.Array[ctypes.c_void_p],
    _kept: object,
) -> None:
    launch(name, blocks, threads, pointers)


OVERLAP_SINCE = (9, 0)  # compute capability of GPUs that know programmatic dependent launch


def compiled(source: Path, device: torch.device, *, waits: bool = False) -> LoadedKernels:
    """The kernels of a source for this GPU. Raises `StartError` if they cannot be compiled or loaded.

    `waits`: all of them call `wait_for_previous` (overlap.cuh).
    """
    major, minor = torch.cuda.get_device_capability(device)
    cubin = compile_for(source, f"sm_{major}{minor}")
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # torch has made its context by then, which the driver loads into
        return LoadedKernels(cubin, overlaps=waits and (major, minor) >= OVERLAP_SINCE)


class LoadedKernels:
    """`Launch` by the driver: a compiled source, loaded into the context that is current."""

    def __init__(self, cubin: bytes, *, overlaps: bool = False) -> None:
        """`overlaps`: in a graph a kernel may begin while the one before ends; it waits for that one itself."""
        driver, _ = _bindings()
        self._driver = driver
        (self._module,) = _checked(driver.cuModuleLoadData(cubin), "the driver cannot load the kernels")
        self._functions: dict[str, Any] = {}
        self._overlaps = overlaps

    def __call__(
        self, name: str, blocks: int, threads: int, arguments: ctypes.Array[ctypes.c_void_p]
    ) -> None:
        """See `Launch`."""
        if (function := self._functions.get(name)) is None:
            found = self._driver.cuModuleGetFunction(self._module, name.encode())
            (function,) = _checked(found, f"the kernels have no {name}")
            self._functions[name] = function
        stream = torch.cuda.current_stream().cuda_stream
        pointers = ctypes.addressof(arguments)
        # Where launches are not captured their own time is what counts, and a longer one brings nothing.
        if self._overlaps and torch.cuda.is_current_stream_capturing():
            config = self._overlapping(blocks, threads, stream)
            (status,) = self._driver.cuLaunchKernelEx(config, function, pointers, 0)
        else:
            (status,) = self._driver.cuLaunchKernel(
                function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, 0
            )
        if int(status) != 0:
            raise InvariantError(
                f"the driver refused {name} with {blocks} blocks of {threads}: {status.name}"
            )

    def _overlapping(self, blocks: int, threads: int, stream: int) -> Any:
        config, attribute = self._driver.CUlaunchConfig(), self._driver.CUlaunchAttribute()
        attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.hStream, config.attrs, config.numAttrs = stream, [attribute], 1
        return config


def compile_for(source: Path, architecture: str) -> bytes:
    """A source as a cubin for an architecture such as `sm_90`. Raises `StartError` with the compiler's own words."""
    _, nvrtc = _bindings()
    try:
        headers = sorted(source.parent.glob("*.cuh"))
        texts, names = (
            [of(each) for each in headers] for of in (Path.read_bytes, lambda path: path.name.encode())
        )
        created = nvrtc.nvrtcCreateProgram(
            source.read_bytes(), source.name.encode(), len(headers), texts, names
        )
    except RuntimeError as error:  # its library is loaded by the first call
        raise StartError(
            f"NVRTC is missing ({_first_line(error)}): install torch's build for CUDA 13, or use device cpu"
        ) from None
    (program,) = _checked(created, "NVRTC cannot start")
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--fmad=false"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status) != 0:
            raise StartError(
                f"NVRTC cannot compile {source.name} for {architecture} ({status.name}): {_log(nvrtc, program)}"
            )
        (size,) = _checked(nvrtc.nvrtcGetCUBINSize(program), "NVRTC compiled nothing")
        cubin = bytes(size)
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin), "NVRTC compiled nothing")
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _bindings() -> tuple[Any, Any]:
    """The driver's and NVRTC's functions; torch on CUDA brings them, torch on CPU does not."""
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise StartError(
            f"cuda-bindings is missing ({error}): install torch's build for CUDA 13, or use device cpu"
        ) from None
    return driver, nvrtc


def _checked(result: tuple[Any, ...], sentence: str) -> tuple[Any, ...]:
    """What a call returned besides its status. Raises `StartError` with `sentence` if the status is an error."""
    status, *values = result
    if int(status) != 0:
        raise StartError(f"{sentence}: {status.name}; use device cpu if this GPU or its driver is too old")
    return tuple(values)


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


def _log(nvrtc: Any, program: Any) -> str:
    (size,) = _checked(nvrtc.nvrtcGetProgramLogSize(program), "NVRTC has no log")
    words = bytes(size)
    _checked(nvrtc.nvrtcGetProgramLog(program, words), "NVRTC has no log")
    return words.rstrip(b"\0").decode(errors="replace").strip()

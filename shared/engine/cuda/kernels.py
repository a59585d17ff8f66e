"""`StepKernels` by `step_kernels.cu`, compiled at start for the GPU that is there.

NVRTC compiles it, so an image needs no nvcc and no header; it and `cuda-bindings` come with torch on CUDA. Products are
not fused into sums: tokens are then those of `ReferenceKernels`. Has not run on a GPU yet: tests compile the same
source for CPUs, launch it through the same code, and have NVRTC compile it for four architectures.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shared.engine.cuda.step_kernels import REPORT_WORDS, STATE_WORDS
from shared.primitives.errors import InvariantError, StartError

SOURCE = Path(__file__).with_name("step_kernels.cu")
_ROW_THREADS = 1024  # a row of logits is long
_PREPARE_THREADS = 128
_WRITE_THREADS = 256

Argument = Tensor | ctypes.c_int | ctypes.c_longlong


class Launch(Protocol):
    """Runs a kernel of `step_kernels.cu`."""

    def __call__(
        self, name: str, blocks: int, threads: int, arguments: ctypes.Array[ctypes.c_void_p]
    ) -> None:
        """Launch it on torch's current stream; `arguments` are pointers to the arguments, as cuLaunchKernel takes them.

        They are read before this returns.
        """


class CudaKernels:
    """See `StepKernels`. All tensors are contiguous, but rows of `logits` and `page_tables` may lie apart."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    @classmethod
    def compiled(cls, device: torch.device) -> CudaKernels:
        """Compiled for this GPU. Raises `StartError` if they cannot be."""
        major, minor = torch.cuda.get_device_capability(device)
        cubin = compile_for(f"sm_{major}{minor}")
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # torch has made its context by then, which the driver loads into
            return cls(LoadedKernels(cubin))

    def write_words(self, entries: Tensor, words: Tensor) -> None:
        """See `StepKernels`."""
        count = len(entries)
        if count == 0:  # CUDA refuses a launch of no blocks
            return
        blocks = (count - 1) // _WRITE_THREADS + 1
        self._run("write_words", blocks, _WRITE_THREADS, entries, ctypes.c_int(count), words)

    def prepare_decode(
        self,
        slots: Tensor,
        kv_indptr: Tensor,
        page_tables: Tensor,
        state: Tensor,
        page_size: int,
        token_ids: Tensor,
        positions: Tensor,
        kv_last_page_len: Tensor,
        kv_indices: Tensor,
    ) -> None:
        """See `StepKernels`."""
        self._run(
            "prepare_decode",
            len(slots),
            _PREPARE_THREADS,
            slots,
            kv_indptr,
            page_tables,
            ctypes.c_longlong(page_tables.stride(0)),
            state,
            ctypes.c_int(len(state) - 1),
            ctypes.c_int(page_size),
            token_ids,
            positions,
            kv_last_page_len,
            kv_indices,
        )

    def choose_tokens(self, logits: Tensor, slots: Tensor, state: Tensor, tokens: Tensor) -> None:
        """See `StepKernels`."""
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        assert state.shape[1] == STATE_WORDS
        self._run(
            "choose_tokens",
            len(slots),
            _ROW_THREADS,
            logits,
            ctypes.c_longlong(logits.stride(0)),
            ctypes.c_int(logits.shape[1]),
            slots,
            ctypes.c_int(len(state) - 1),
            state,
            tokens,
        )

    def logprobs(
        self, logits: Tensor, rows: Tensor, token_ids: Tensor, tops: Tensor, reports: Tensor
    ) -> None:
        """See `StepKernels`."""
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        assert reports.shape[1] == REPORT_WORDS
        self._run(
            "logprobs",
            len(rows),
            _ROW_THREADS,
            logits,
            ctypes.c_longlong(logits.stride(0)),
            ctypes.c_int(logits.shape[1]),
            rows,
            token_ids,
            tops,
            reports,
        )

    def _run(self, name: str, blocks: int, threads: int, *arguments: Argument) -> None:
        values = [
            ctypes.c_void_p(each.data_ptr()) if isinstance(each, Tensor) else each for each in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._launch(name, blocks, threads, pointers)


class LoadedKernels:
    """`Launch` by the driver: a compiled module, loaded into the context that is current."""

    def __init__(self, cubin: bytes) -> None:
        driver, _ = _bindings()
        self._driver = driver
        (self._module,) = _checked(driver.cuModuleLoadData(cubin), "the driver cannot load the kernels")
        self._functions: dict[str, Any] = {}

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
        (status,) = self._driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, 0)
        if int(status) != 0:
            raise InvariantError(
                f"the driver refused {name} with {blocks} blocks of {threads}: {status.name}"
            )


def compile_for(architecture: str) -> bytes:
    """The kernels as a cubin for an architecture such as `sm_90`. Raises `StartError` with the compiler's own words."""
    _, nvrtc = _bindings()
    try:
        created = nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), SOURCE.name.encode(), 0, None, None)
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
                f"NVRTC cannot compile {SOURCE.name} for {architecture} ({status.name}): {_log(nvrtc, program)}"
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

"""Rounds the inputs of linears to 8 bits by `fp8_inputs.cu`, in one launch a linear."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from shared.engine.cuda.kernels.compiled_kernels import Launch, compiled, run_kernel
from shared.engine.quantized.fp8 import E4M3, padded_rows
from shared.engine.quantized.fp8_formats import BLOCK

SOURCE = Path(__file__).with_name("fp8_inputs.cu")
_EACH = 8  # numbers of a thread at once
_THREADS = 256
_WARP = 32


class CudaRounding:
    """See `Rounding`; x of bfloat16, its sizes multiples of 8."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    @classmethod
    def compiled(cls, device: torch.device) -> CudaRounding:
        """Compiled for this GPU. Raises `StartError` if it cannot be."""
        return cls(compiled(SOURCE, device, waits=True))

    def rows(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Rounding`."""
        x, (rows, size) = _readable(x), x.shape
        values = torch.empty(rows, size, dtype=E4M3, device=x.device)
        scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
        if rows:
            warps = min(_THREADS, -(-size // _EACH)) // _WARP or 1
            numbers = ctypes.c_longlong(x.stride(0)), ctypes.c_int(size)
            run_kernel(self._launch, "round_rows", rows, warps * _WARP, x, *numbers, scale, values, scales)
        return values, scales

    def blocks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Rounding`."""
        x, (rows, size) = _readable(x), x.shape
        padded, blocks = padded_rows(rows), size // BLOCK
        values = torch.empty(padded, size, dtype=E4M3, device=x.device)
        scales = torch.empty(blocks, padded, dtype=torch.float32, device=x.device)
        if padded:
            numbers = (ctypes.c_int(each) for each in (rows, padded, blocks))
            stride, count = ctypes.c_longlong(x.stride(0)), -(-padded * size // (_EACH * _THREADS))
            run_kernel(self._launch, "round_blocks", count, _THREADS, x, stride, *numbers, values, scales)
        return values, scales.t()


def _readable(x: Tensor) -> Tensor:
    """Rows that begin where 16 bytes are read at once."""
    assert x.dtype == torch.bfloat16
    assert x.shape[1] % _EACH == 0
    apart = x.stride(1) == 1 and x.stride(0) % _EACH == 0 and x.data_ptr() % 16 == 0
    return x if apart else x.contiguous()

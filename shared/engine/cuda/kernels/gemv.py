"""Products of one to four rows by `gemv.cu`: a small batch waits for its weights alone."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from shared.engine.cuda.kernels.compiled_kernels import Launch, compiled, run_kernel

SOURCE = Path(__file__).with_name("gemv.cu")
ROWS_MAX = 4
_THREADS = 256
_WARPS = _THREADS // 32  # of a block
_LOADED = 8  # numbers that a lane reads at once
_OUTPUTS = 2  # of a warp, or of the warps that share them
_WARPS_A_PROCESSOR = 24  # that read at a time
_FEW_OUTPUTS = 16  # of a processor
_ALIGNED = 16  # bytes


class Gemv:
    """y = x Wᵀ + b for few rows in 16 bits, summed in float32."""

    def __init__(self, launch: Launch, processors: int = 1) -> None:
        """`processors`: of the GPU."""
        self._launch = launch
        self._warps = _WARPS_A_PROCESSOR * processors
        self._few_outputs = _FEW_OUTPUTS * processors

    @classmethod
    def compiled(cls, device: torch.device) -> Gemv:
        """Compiled for this GPU. Raises `StartError` if it cannot be."""
        return cls(
            compiled(SOURCE, device, waits=True),
            torch.cuda.get_device_properties(device).multi_processor_count,
        )

    def rows_max(self, weight: Tensor) -> int:
        """Rows up to which this is the faster way for a weight [outputs, inputs]; 0 if the kernel cannot read it.

        One, and `ROWS_MAX` where a library leaves processors idle, as outputs are few.
        """
        if not weight.is_contiguous() or weight.shape[1] % _LOADED or weight.data_ptr() % _ALIGNED:
            return 0
        return ROWS_MAX if len(weight) <= self._few_outputs else 1

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
        """Write y [rows, outputs], in the type of x or float32, and return it.

        x [rows, inputs] of at most `ROWS_MAX` rows, weight [outputs, inputs] (see `rows_max`), bias [outputs]. Rows of
        x and y may lie apart.
        """
        rows, inputs = x.shape
        outputs = len(weight)
        assert x.dtype == weight.dtype
        assert x.stride(1) == y.stride(1) == 1
        assert x.stride(0) % _LOADED == 0
        assert x.data_ptr() % _ALIGNED == 0
        assert 0 < rows <= ROWS_MAX
        assert weight.shape[1] == inputs
        assert y.shape == (rows, outputs)
        split = self._split(inputs, outputs)
        names = (str(each.dtype).removeprefix("torch.") for each in (x, y))
        run_kernel(
            self._launch,
            "_".join(("gemv", *names, str(rows if rows <= 2 else ROWS_MAX))),
            -(-outputs // (_OUTPUTS * (_WARPS // split))),
            _THREADS,
            x,
            ctypes.c_longlong(x.stride(0)),
            ctypes.c_int(rows),
            weight,
            bias,
            ctypes.c_int(inputs),
            ctypes.c_int(outputs),
            ctypes.c_int(split),
            y,
            ctypes.c_longlong(y.stride(0)),
        )
        return y

    def _split(self, inputs: int, outputs: int) -> int:
        """Warps that share their outputs: as many as run at a time, as long as each has something to read."""
        split = 1
        while (
            split < _WARPS
            and -(-outputs // _OUTPUTS) * 2 * split <= self._warps
            and 2 * split * 32 * _LOADED <= inputs
        ):
            split *= 2
        return split

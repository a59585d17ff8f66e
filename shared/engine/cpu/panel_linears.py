"""Linears by compiled kernels, for models whose blocks torch puts together: mixtures of experts.

A row has the same bits whatever the rows beside it and the number of threads, as in the dense decoder by these kernels.
Matrices of 16 bits stay so. All linears share the threads of one team; calls come one at a time.
"""

from __future__ import annotations

import weakref
from ctypes import byref

import torch
from torch import Tensor

from shared.engine.cpu.native_decoder import KIND_NUMBERS
from shared.engine.gguf.packing import narrowest_kind, pack_float
from shared.engine.native.kernels import Kernels, NativeLayer, NativeMatrix, NativeShape
from shared.primitives.errors import ConfigError


class PanelLinears:
    """Makes linears of float32 in and out."""

    def __init__(self, library: Kernels, threads: int) -> None:
        """`ConfigError` where so many threads cannot be started."""
        self.library = library
        nothing = NativeShape()  # a decoder without layers: only its threads are used
        self.team = library.decoder_new(byref(nothing), (NativeLayer * 1)(), 0, threads)
        if self.team is None:
            raise ConfigError(f"{threads} threads cannot be started: ask for fewer")
        weakref.finalize(self, library.decoder_delete, self.team).atexit = False  # see `NativeDecoder`

    def __call__(self, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        """y = x Wᵀ + b; weight float32 [outputs, inputs]."""
        return PanelLinear(self, weight, bias)


class PanelLinear:
    """See `Linear`."""

    def __init__(self, linears: PanelLinears, weight: Tensor, bias: Tensor | None) -> None:
        self._linears = linears
        self.output_size, self.input_size = weight.shape
        kind = narrowest_kind(weight)
        self._panels = pack_float(weight, kind)
        self._bias = None if bias is None else bias.contiguous()
        self._matrix = NativeMatrix(
            kind=KIND_NUMBERS[kind],
            outputs=self.output_size,
            inputs=self.input_size,
            panels=self._panels.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [rows, inputs] → [rows, outputs]."""
        assert x.dtype == torch.float32, x.dtype
        assert x.shape[1] == self.input_size, x.shape
        x, y = x.contiguous(), x.new_empty(len(x), self.output_size)
        linears = self._linears
        linears.library.gemm(linears.team, byref(self._matrix), x.data_ptr(), len(x), y.data_ptr())
        return y

"""One product by compiled kernels, and random matrices of every kind to make it with."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from shared.engine.cpu.native_weights import KIND_NUMBERS
from shared.engine.gguf.packing import FLOAT_KINDS, Kind, pack_blocks, pack_float
from shared.engine.native import kernels
from shared.engine.native.build import build, choose
from shared.engine.native.kernels import Kernels
from tests.unit.engine.cpu.random_blocks import even_rows

KINDS: tuple[Kind, ...] = (
    "f32",
    "bf16",
    "f16",
    "q4_0",
    "q4_1",
    "q8_0",
    "q5_0",
    "q5_1",
    "q4_k",
    "q5_k",
    "q6_k",
)


class Product:
    """y = x · Wᵀ + b."""

    def __init__(self, name: str, threads: int):
        self._library = Kernels(build(choose(name)))
        nothing = kernels.NativeShape()  # a decoder without layers: only its threads are used
        self._decoder = self._library.decoder_new(
            ctypes.byref(nothing), (kernels.NativeLayer * 1)(), 0, threads
        )

    def close(self) -> None:
        """End the threads."""
        self._library.decoder_delete(self._decoder)

    def __call__(
        self, x: Tensor, kind: Kind, packed: Tensor, outputs: int, bias: Tensor | None = None
    ) -> Tensor:
        """x float32 [rows, inputs], packed as in `PackedWeight.data` → float32 [rows, outputs]."""
        y = torch.full((len(x), outputs), torch.nan)
        self.write(y, x, kind, packed, bias)
        return y

    def write(self, y: Tensor, x: Tensor, kind: Kind, packed: Tensor, bias: Tensor | None = None) -> None:
        """The same into y: memory touched for the first time costs more than a product."""
        assert x.is_contiguous()
        assert y.is_contiguous()
        matrix = kernels.NativeMatrix(
            kind=KIND_NUMBERS[kind],
            outputs=y.shape[1],
            inputs=x.shape[1],
            panels=packed.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
        )
        self._library.gemm(self._decoder, ctypes.byref(matrix), x.data_ptr(), len(x), y.data_ptr())


def packed_weight(kind: Kind, outputs: int, inputs: int, generator: torch.Generator) -> Tensor:
    """A random matrix. Scales of blocks are small numbers: bytes at random could be no numbers at all."""
    if kind in FLOAT_KINDS:
        return pack_float(torch.randn(outputs, inputs, generator=generator), kind)
    return pack_blocks(kind, even_rows(kind, outputs, inputs, generator))

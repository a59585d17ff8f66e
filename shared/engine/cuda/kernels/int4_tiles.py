"""Dequantizes weights of 4 bits by `int4_tiles.cu`, for steps of more rows than torch's kernel of few is fast with."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from shared.engine.cuda.kernels.compiled_kernels import Launch, compiled, run_kernel
from shared.engine.quantized.int4 import Tiles

SOURCE = Path(__file__).with_name("int4_tiles.cu")
_THREADS = 256
_MADE = 8  # numbers of a thread


class CudaTiles:
    """`Dequantize` in one launch, into memory that is taken for the call."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    @classmethod
    def compiled(cls, device: torch.device) -> CudaTiles:
        """Compiled for this GPU. Raises `StartError` if it cannot be."""
        return cls(compiled(SOURCE, device))

    def __call__(self, tiles: Tiles) -> Tensor:
        """bfloat16 [outputs, inputs], bit for bit what `Tiles.dequantized` gives."""
        outputs, inputs = tiles.shape
        assert tiles.words.is_contiguous()
        assert tiles.scales_and_zeros.is_contiguous()
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=tiles.words.device)
        run_kernel(
            self._launch,
            "dequantize_int4",
            -(-outputs * inputs // (_MADE * _THREADS)),
            _THREADS,
            tiles.words,
            tiles.scales_and_zeros,
            weight,
            *(ctypes.c_int(each) for each in (outputs, inputs, tiles.words.shape[3], tiles.group)),
        )
        return weight

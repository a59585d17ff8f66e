"""Matrices of a layer's experts as their file packs them: 4 bits or 8 a number, and scales.

They stay so in memory. Kernels read them packed, or a part of them is unpacked into 16 bits for a product of many rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from shared.engine.quantized import mxfp4
from shared.engine.quantized.fp8_formats import BLOCK, EXPERTS_STEP


class PackedFormat(Enum):
    """How numbers are packed."""

    MXFP4 = "mxfp4"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """Matrices [experts, outputs, inputs].

    MXFP4: uint8 [experts, outputs, inputs / 2] and [experts, outputs, inputs / 32].
    FP8: e4m3 [experts, outputs, inputs] and float32 [experts, ⌈outputs / scale_rows⌉, columns]: so many rows share
    their scales, and there is one column, or one for each 128 inputs.
    """

    packing: PackedFormat
    values: Tensor
    scales: Tensor
    scale_rows: int = 1

    def __post_init__(self) -> None:
        assert self.values.is_contiguous()
        assert self.scales.is_contiguous()
        assert self.inputs % EXPERTS_STEP == 0

    @property
    def outputs(self) -> int:
        """Number of rows of a matrix."""
        return self.values.shape[1]

    @property
    def inputs(self) -> int:
        """Numbers of a row."""
        return self.values.shape[2] * (2 if self.packing is PackedFormat.MXFP4 else 1)

    def unpacked(self, expert: int, first: int, rows: int) -> Tensor:
        """Rows of an expert's matrix, float32 [rows, inputs]: what every way to compute is compared with."""
        values = self.values[expert, first : first + rows]
        if self.packing is PackedFormat.MXFP4:
            scales = self.scales[expert, first : first + rows]
            return mxfp4.dequantized(values.view(rows, -1, mxfp4.BLOCK // 2), scales)
        places = torch.arange(first, first + rows, device=values.device) // self.scale_rows
        scales = self.scales[expert].index_select(0, places)
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(BLOCK, dim=1, output_size=scales.shape[1] * BLOCK)
        return values.float() * scales[:, : self.inputs]


def unpack(matrices: PackedMatrices, first: int, wide: Tensor) -> None:
    """Write so many rows of each matrix, from `first` on, as numbers of another type: wide [experts, rows, inputs]."""
    for expert in range(len(wide)):
        wide[expert] = matrices.unpacked(expert, first, wide.shape[1])

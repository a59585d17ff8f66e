"""Matrices of a layer's experts in 4 bits or 8 a number, with scales, as their file packs them or close to it.

They stay so in memory. Kernels read them packed, or a part of them is unpacked into 16 bits for a product of many rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from shared.engine.quantized import int4, mxfp4
from shared.engine.quantized.fp8_formats import BLOCK, EXPERTS_STEP
from shared.engine.quantized.int4_packings import Int4Weight
from shared.engine.quantized.int4_packings import unpacked as unpacked_int4


class PackedFormat(Enum):
    """How numbers are packed."""

    MXFP4 = "mxfp4"
    FP8 = "fp8"
    INT4 = "int4"


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """Matrices [experts, outputs, inputs].

    MXFP4: uint8 [experts, outputs, inputs / 2] and [experts, outputs, inputs / 32].
    FP8: e4m3 [experts, outputs, inputs] and float32 [experts, ⌈outputs / scale_rows⌉, columns]: so many rows share
    their scales, and there is one column, or one for each 128 inputs.
    INT4: uint8 [experts, outputs, inputs / 2], float32 [experts, outputs, groups] and zeros uint8: see `Int4Weight`.
    """

    packing: PackedFormat
    values: Tensor
    scales: Tensor
    scale_rows: int = 1
    zeros: Tensor | None = None  # of INT4

    def __post_init__(self) -> None:
        assert self.values.is_contiguous()
        assert self.scales.is_contiguous()
        assert (self.zeros is not None) == (self.packing is PackedFormat.INT4)
        assert self.zeros is None or (self.zeros.is_contiguous() and self.zeros.shape == self.scales.shape)
        assert self.inputs % EXPERTS_STEP == 0

    @property
    def outputs(self) -> int:
        """Number of rows of a matrix."""
        return self.values.shape[1]

    @property
    def inputs(self) -> int:
        """Numbers of a row."""
        return self.values.shape[2] * (1 if self.packing is PackedFormat.FP8 else 2)

    @property
    def nbytes(self) -> int:
        """Bytes of numbers, scales and zeros."""
        return sum(each.nbytes for each in (self.values, self.scales, self.zeros) if each is not None)

    def unpacked(self, expert: int, first: int, rows: int) -> Tensor:
        """Rows of an expert's matrix, float32 [rows, inputs], as the file means them."""
        if self.zeros is not None:
            return self._int4(expert, first, rows).dequantized()
        values = self.values[expert, first : first + rows]
        if self.packing is PackedFormat.MXFP4:
            scales = self.scales[expert, first : first + rows]
            return mxfp4.dequantized(values.view(rows, -1, mxfp4.BLOCK // 2), scales)
        places = torch.arange(first, first + rows, device=values.device) // self.scale_rows
        scales = self.scales[expert].index_select(0, places)
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(BLOCK, dim=1, output_size=scales.shape[1] * BLOCK)
        return values.float() * scales[:, : self.inputs]

    def multiplied(self, expert: int, first: int, rows: int) -> Tensor:
        """Rows of an expert's matrix, float32 [rows, inputs], as products in bfloat16 take them before they round.

        They differ from those of `unpacked` in INT4 alone: scales and zeros are rounded first.
        """
        if self.zeros is None:
            return self.unpacked(expert, first, rows)
        weight = self._int4(expert, first, rows)
        return int4.multiplied(unpacked_int4(weight.values), int4.scales_and_zeros(weight)).float()

    def _int4(self, expert: int, first: int, rows: int) -> Int4Weight:
        assert self.zeros is not None
        own = slice(first, first + rows)
        return Int4Weight(self.values[expert, own], self.scales[expert, own], self.zeros[expert, own])


def unpack(matrices: PackedMatrices, first: int, wide: Tensor) -> None:
    """Write so many rows of each matrix, from `first` on, as numbers of another type: wide [experts, rows, inputs]."""
    for expert in range(len(wide)):
        wide[expert] = matrices.multiplied(expert, first, wide.shape[1])

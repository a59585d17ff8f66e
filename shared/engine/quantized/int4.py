"""Products with weights of 4 bits. What is multiplied with is one number for each weight, in bfloat16, everywhere here:

    scale and zero    rounded to bfloat16; `zero` is what the middle of the numbers, 8, stands for: (8 - zero) * scale
    weight            (number - 8) * scale + zero, rounded once

    few rows, compute capability 8.0 and above   `aten._weight_int4pack_mm`, which reads weights in tiles of its own
    more rows there                              dequantized from the tiles for each call (cuda/kernels/int4_tiles.cu)
    elsewhere, and deterministic                 dequantized for each call

The CPU engine dequantizes at load, into its own type and without rounding. Nothing looks at a value, so all may be
captured as a CUDA graph.

The layout of tiles and the kernel's roundings were read in torch's int4mm.cu. A row's sum there has one order, whatever
rows are beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shared.engine.quantized.formats import Quantization
from shared.engine.quantized.int4_formats import Int4Format
from shared.engine.quantized.int4_packings import MIDDLE, Int4Weight, unpacked
from shared.primitives.errors import ConfigError

# Rows up to which reading the weights again for each 16 of them, at half a byte a number, is less than 4.5 bytes a
# number to dequantize and read them: 144 by that count. The kernel stages nothing, so fewer.
FEW_ROWS = 64
_TILES_CAPABILITY = (8, 0)
_TILE = 16  # inputs of a tile, of which a lane reads 8, 4 or 2 at once
# Where a word of a tile has the numbers of its inputs: of four pairs of neighbours, 8 inputs apart.
_SHIFTS = [4 * pair + half for pair in range(4) for half in (0, 16)]
_AT_ONCE = 1 << 24  # numbers that are dequantized at a time where torch does it
_WHILE_BYTES = 1 + 4 + 2  # a number, meanwhile

Dequantize = Callable[["Tiles"], Tensor]


@dataclass(frozen=True, slots=True)
class Tiles:
    """A weight as `aten._weight_int4pack_mm` reads it."""

    words: Tensor  # int32 [outputs / 8, inputs / (16 * lane), 32, lane / 2]: a lane's tiles
    scales_and_zeros: Tensor  # bfloat16 [groups, outputs, 2]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        eights, spans, lanes, words = self.words.shape
        return eights * 8, spans * lanes * words

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // len(self.scales_and_zeros)

    @classmethod
    def of(cls, weight: Int4Weight) -> Tiles:
        """The tiles of a weight on a GPU."""
        inputs = 2 * weight.values.shape[1]
        lane = next(tiles for tiles in (8, 4, 2) if inputs % (tiles * _TILE) == 0)
        words = torch.ops.aten._convert_weight_to_int4pack(weight.values, lane)
        return cls(words, scales_and_zeros(weight))

    def dequantized(self) -> Tensor:
        """bfloat16 [outputs, inputs], by torch: what a kernel is compared with."""
        outputs, inputs = self.shape
        eights, spans, _, words = self.words.shape
        lanes = self.words.view(eights, spans, 8, 4, words)  # an output has four
        parts = [((lanes >> shift) & 0x0F).byte() for shift in _SHIFTS]
        numbers = torch.stack(parts, dim=-1).view(eights, spans, 8, 4, words, 4, 2)
        # [eights, spans, output, lane, word, pair, of a pair] → inputs in order
        by_input = numbers.permute(0, 2, 1, 4, 5, 3, 6).reshape(outputs, inputs)
        return multiplied(by_input, self.scales_and_zeros)


def scales_and_zeros(weight: Int4Weight) -> Tensor:
    """bfloat16 [groups, outputs, 2]."""
    scales = weight.scales.bfloat16()
    zeros = ((MIDDLE - weight.zeros.float()) * scales.float()).bfloat16()
    return torch.stack((scales, zeros), dim=-1).transpose(0, 1).contiguous()


def multiplied(numbers: Tensor, scales_and_zeros: Tensor) -> Tensor:
    """Weights of numbers uint8 [outputs, inputs], bfloat16. Their sums are exact in float32, so they round once."""
    outputs, inputs = numbers.shape
    groups = len(scales_and_zeros)
    scales, zeros = (
        scales_and_zeros.float().transpose(0, 1).unsqueeze(2).unbind(dim=-1)
    )  # [outputs, groups, 1]
    result = torch.empty(outputs, groups, inputs // groups, dtype=torch.bfloat16, device=numbers.device)
    wide = numbers.view(outputs, groups, -1)
    rows = max(1, _AT_ONCE // inputs)
    for first in range(0, outputs, rows):
        some = slice(first, first + rows)
        result[some] = wide[some].float().sub_(MIDDLE).mul_(scales[some]).add_(zeros[some])
    return result.view(outputs, inputs)


# ---- ways to compute -------------------------------------------------------------------------------------------------


def few_rows(x: Tensor, tiles: Tiles) -> Tensor:
    """x bfloat16 [rows, inputs] → [rows, outputs], by torch's kernel on a GPU."""
    y: Tensor = torch.ops.aten._weight_int4pack_mm(
        x.contiguous(), tiles.words, tiles.group, tiles.scales_and_zeros
    )
    return y


class ByTiles:
    """Few rows by torch's kernel, more by weights that are dequantized for the call."""

    def __init__(self, tiles: Tiles, bias: Tensor | None, dequantize: Dequantize) -> None:
        self._tiles, self._bias, self._dequantize = tiles, bias, dequantize

    def __call__(self, x: Tensor) -> Tensor:
        """x bfloat16 [rows, inputs] → [rows, outputs]."""
        if len(x) > FEW_ROWS:
            return functional.linear(x, self._dequantize(self._tiles), self._bias)
        y = few_rows(x, self._tiles)
        return y if self._bias is None else y + self._bias


class _ByPacked:
    """Weights that are dequantized for each call, to the numbers that `ByTiles` multiplies with."""

    def __init__(self, weight: Int4Weight, bias: Tensor | None) -> None:
        self._values, self._scales_and_zeros = weight.values, scales_and_zeros(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        weight = multiplied(unpacked(self._values), self._scales_and_zeros)
        return functional.linear(x, weight.to(x.dtype), self._bias)


Int4Linear = ByTiles | _ByPacked


@dataclass(frozen=True, slots=True)
class Int4Products:
    """What a device multiplies in 4 bits."""

    by_tiles: bool = False
    dequantize: Dequantize = Tiles.dequantized  # by a kernel on a GPU

    @classmethod
    def on_gpu(
        cls,
        capability: tuple[int, int],
        *,
        deterministic: bool,
        dequantize: Dequantize = Tiles.dequantized,
    ) -> Int4Products:
        """Products of a GPU. Which way is taken depends on the rows, so deterministic mode has one."""
        return cls(capability >= _TILES_CAPABILITY and not deterministic, dequantize)

    def way(self, form: Int4Format) -> str:
        """How linears of this format are computed, for descriptions and fingerprints."""
        return f"{form.name} {'multiplied' if self.by_tiles else 'dequantized'}"

    def linear(self, weight: Int4Weight, bias: Tensor | None) -> Int4Linear:
        """y = x Wᵀ + b."""
        if self.by_tiles:
            return ByTiles(Tiles.of(weight), bias, self.dequantize)
        return _ByPacked(weight, bias)

    def check(self, form: Int4Format, dtype: torch.dtype) -> None:
        """Raise `ConfigError` for a type that the kernel does not compute."""
        if self.by_tiles and dtype != torch.bfloat16:
            name = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"weights of {form.name} are multiplied in bfloat16 on cuda, not in {name}: set dtype to bfloat16"
            )

    def dequantized_bytes(
        self, quantization: Quantization, linears: Iterable[Sequence[tuple[str, int, int]]]
    ) -> int:
        """Memory for the largest linear while it is dequantized for a call: `linears` as `ModelConfig` gives them.

        Words are unpacked at load, one linear after the other: that takes less.
        """
        largest = max(
            (
                sum(outputs for _, outputs, _ in group) * group[0][2]
                for group in linears
                if quantization.format_of(group[0][0])
            ),
            default=0,
        )
        return largest * 2 + (0 if self.by_tiles else min(largest, _AT_ONCE) * _WHILE_BYTES)
